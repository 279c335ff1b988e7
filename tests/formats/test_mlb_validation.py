"""One crafted file for each row of the specification's validation table, with its status, place and wording."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from krafla_cli.errors import FileError, FormatError, ShapeError
from krafla_cli.formats.mlb import LAYOUT, Header
from krafla_cli.formats.mlb_file import open_mlb, validate
from tests.formats.test_mlb import FULL, MINIMAL, write

FORMAT, SHAPE = "ML_E_FORMAT", "ML_E_SHAPE"
NAN, INF = float("nan"), float("inf")


def patched(header: Header, **values: object) -> bytes:
    """A complete file of ``header`` whose fields are then overwritten, rules or no rules."""
    data = bytearray(write(header))
    for name, value in values.items():
        field = LAYOUT[name]
        struct.pack_into("<" + field.code, data, field.offset, value)
    return bytes(data)


def faults_of(tmp_path: Path, data: bytes) -> list[tuple[str, str, int | None, str]]:
    path = tmp_path / "m.mlb"
    path.write_bytes(data)
    return [(f.status, f.where, f.offset, f.message) for f in validate(path).faults]


LLAMA3 = replace(
    MINIMAL, rope_type=1, rope_factor=8.0, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0, rope_orig_max_seq=64
)
YARN = replace(
    MINIMAL,
    rope_type=3,
    rope_factor=4.0,
    rope_low_freq_factor=32.0,
    rope_high_freq_factor=1.0,
    rope_orig_max_seq=64,
    rope_attn_factor=1.0,
)
LINEAR = replace(MINIMAL, rope_type=2, rope_factor=2.0)
Q4 = replace(MINIMAL, wtype=2)

# (status, base, field, value, rule)
HEADER_FAULTS = [
    (FORMAT, MINIMAL, "wtype", 0, "must be 1 (Q8_0) or 2 (Q4_0), is 0"),
    (FORMAT, MINIMAL, "wtype", 3, "must be 1 (Q8_0) or 2 (Q4_0), is 3"),
    (FORMAT, MINIMAL, "rope_type", 4, "must be 0 to 3, is 4"),
    (FORMAT, LLAMA3, "rope_factor", 0.0, "must be > 0, is 0"),
    (FORMAT, LLAMA3, "rope_low_freq_factor", 0.0, "must be > 0, is 0"),
    (FORMAT, LLAMA3, "rope_high_freq_factor", 1.0, "must be > rope_low_freq_factor, is 1"),
    (FORMAT, LLAMA3, "rope_orig_max_seq", 0, "must be > 0, is 0"),
    (FORMAT, LLAMA3, "rope_factor", NAN, "must be finite, is nan"),
    (FORMAT, LINEAR, "rope_factor", -1.0, "must be > 0, is -1"),
    (FORMAT, YARN, "rope_factor", 0.0, "must be > 0, is 0"),
    (FORMAT, YARN, "rope_high_freq_factor", 0.0, "must be > 0 and < beta_fast, is 0"),
    (FORMAT, YARN, "rope_high_freq_factor", 32.0, "must be > 0 and < beta_fast, is 32"),
    (FORMAT, YARN, "rope_orig_max_seq", 0, "must be > 0, is 0"),
    (FORMAT, YARN, "rope_attn_factor", 0.0, "must be > 0 with yarn, is 0"),
    (FORMAT, YARN, "rope_theta", 1.0, "must not be 1 with yarn, is 1"),
    (FORMAT, MINIMAL, "rope_attn_factor", 1.0, "must be 0 without yarn, is 1"),
    (FORMAT, MINIMAL, "qkv_bias", 2, "must be 0 or 1, is 2"),
    (FORMAT, MINIMAL, "qk_norm", 2, "must be 0 or 1, is 2"),
    (FORMAT, MINIMAL, "layer_flags", 2, "must be 0 or 1, is 2"),
    (FORMAT, MINIMAL, "post_norms", 2, "must be 0 or 1, is 2"),
    (FORMAT, MINIMAL, "scale_f16", 2, "must be 0 or 1, is 2"),
    (FORMAT, MINIMAL, "attn_gate", 2, "must be 0 or 1, is 2"),
    (FORMAT, MINIMAL, "act", 2, "must be 0 or 1, is 2"),
    (FORMAT, MINIMAL, "embed_scale", -1.0, "must be >= 0, is -1"),
    (FORMAT, MINIMAL, "embed_scale", INF, "must be finite, is inf"),
    (FORMAT, MINIMAL, "attn_scale", -0.5, "must be >= 0, is -0.5"),
    (FORMAT, MINIMAL, "attn_scale", NAN, "must be finite, is nan"),
    (FORMAT, MINIMAL, "attn_softcap", -1.0, "must be >= 0, is -1"),
    (FORMAT, MINIMAL, "final_softcap", INF, "must be finite, is inf"),
    (FORMAT, MINIMAL, "rope_local_theta", -1.0, "must be >= 0, is -1"),
    (FORMAT, MINIMAL, "sliding_window", (1 << 24) + 1, "must be <= 2^24, is 16777217"),
    (FORMAT, MINIMAL, "rope_theta", 0.0, "must be > 0, is 0"),
    (FORMAT, MINIMAL, "rope_theta", NAN, "must be finite, is nan"),
    (FORMAT, MINIMAL, "norm_eps", -1.0, "must be >= 0, is -1"),
    (FORMAT, MINIMAL, "q8_mask", 1, "must be 0 in a Q8_0 model, is 1"),
    (FORMAT, Q4, "q8_mask", 128, "must be 0 to 127, is 128"),
    (SHAPE, MINIMAL, "dim", 0, "must be 1 to 65536, is 0"),
    (SHAPE, MINIMAL, "dim", 65568, "must be 1 to 65536, is 65568"),
    (SHAPE, MINIMAL, "dim", 48, "must be a multiple of 32, is 48"),
    (SHAPE, MINIMAL, "n_layers", 0, "must be 1 to 65536, is 0"),
    (SHAPE, MINIMAL, "n_layers", 65537, "must be 1 to 65536, is 65537"),
    (SHAPE, MINIMAL, "n_heads", 0, "must be 1 to 65536, is 0"),
    (SHAPE, MINIMAL, "n_heads", 3, "must divide dim while head_dim is 0, is 3"),
    (SHAPE, MINIMAL, "n_heads", 32, "must leave dim / n_heads even, is 32"),
    (SHAPE, FULL, "n_heads", 5, "q_dim (head_dim x n_heads) must be a multiple of 32, is 5"),
    (SHAPE, FULL, "n_heads", 8192, "q_dim (head_dim x n_heads) must be at most 65536, is 8192"),
    (SHAPE, MINIMAL, "n_kv_heads", 0, "must be 1 to 65536, is 0"),
    (SHAPE, FULL, "n_kv_heads", 3, "must divide n_heads, is 3"),
    (SHAPE, MINIMAL, "hidden_dim", 0, "must be 1 to 65536, is 0"),
    (SHAPE, MINIMAL, "hidden_dim", 33, "must be a multiple of 32, is 33"),
    (SHAPE, MINIMAL, "hidden_dim", 1 << 17, "must be 1 to 65536, is 131072"),
    (SHAPE, MINIMAL, "vocab", 2, "must be 3 to 16777216, is 2"),
    (SHAPE, MINIMAL, "vocab", (1 << 24) + 1, "must be 3 to 16777216, is 16777217"),
    (SHAPE, MINIMAL, "max_seq", 0, "must be 1 to 16777216, is 0"),
    (SHAPE, MINIMAL, "max_seq", (1 << 24) + 1, "must be 1 to 16777216, is 16777217"),
    (SHAPE, MINIMAL, "head_dim", 17, "must be even, is 17"),
    (SHAPE, FULL, "rot_dim", 7, "must be even, is 7"),
    (SHAPE, FULL, "rot_dim", 18, "must be at most head_dim, is 18"),
    (SHAPE, FULL, "lin_v_heads", 5, "must be a multiple of lin_k_heads, is 5"),
    (SHAPE, FULL, "lin_v_heads", 6, "must be a multiple of 4, is 6"),
    (SHAPE, FULL, "lin_k_dim", 0, "must be 1 to 65536 in a model with linear attention, is 0"),
    (SHAPE, FULL, "lin_k_dim", 1 << 16, "lin_k_heads x lin_k_dim must be <= 65536, is 65536"),
    (SHAPE, FULL, "lin_v_dim", 7, "lin_v_heads x lin_v_dim must divide by 32, is 7"),
    (SHAPE, FULL, "lin_conv", 0, "must be 1 to 65536 in a model with linear attention, is 0"),
    (SHAPE, MINIMAL, "lin_conv", 4, "must be 0 while lin_k_heads is 0, is 4"),
]


@pytest.mark.parametrize(("status", "base", "field", "value", "rule"), HEADER_FAULTS)
def test_header_field(tmp_path: Path, status: str, base: Header, field: str, value: float, rule: str) -> None:
    found = faults_of(tmp_path, patched(base, **{field: value}))
    assert (status, field, LAYOUT[field].offset, rule) in found
    assert {f[1] for f in found} <= {
        field,
        "head_dim",
        "n_heads",
        "n_kv_heads",
        "rot_dim",
        "lin_v_dim",
    }
    error = {FORMAT: FormatError, SHAPE: ShapeError}[status]
    with pytest.raises(error) as raised:
        open_mlb(tmp_path / "m.mlb")
    assert raised.value.status == found[0][0]


def test_every_field_with_a_rule_has_a_case() -> None:
    tested = {case[2] for case in HEADER_FAULTS}
    assert {f.name for f in LAYOUT.fields if f.rules} - tested == {"magic", "version", "lin_k_heads"}


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ((16, 0), "bits other than 1, 2, 4, 8 must be 0, is 16"),
        ((6, 0), "local RoPE (2) and no RoPE (4) cannot be combined, is 6"),
        ((9, 0), "linear attention (8) cannot be combined with other bits, is 9"),
    ],
)
def test_layer_flags(tmp_path: Path, flags: tuple[int, int], rule: str) -> None:
    data = bytearray(write(FULL))
    data[256:258] = bytes(flags)
    assert faults_of(tmp_path, bytes(data)) == [(FORMAT, "layer_flags[0]", 256, rule)]


def test_local_rope_without_a_base(tmp_path: Path) -> None:
    found = faults_of(tmp_path, patched(FULL, rope_local_theta=0.0))
    assert found == [(FORMAT, "layer_flags[0]", 256, "local RoPE (2) needs rope_local_theta > 0, is 3")]


def test_linear_layer_without_sizes(tmp_path: Path) -> None:
    sizes = dict.fromkeys(("lin_k_heads", "lin_v_heads", "lin_k_dim", "lin_v_dim", "lin_conv"), 0)
    found = faults_of(tmp_path, patched(FULL, **sizes))
    assert found == [(FORMAT, "layer_flags[1]", 257, "linear attention (8) needs lin_k_heads > 0, is 8")]


def test_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file") as raised:
        open_mlb(tmp_path / "none.mlb")
    assert raised.value.status == "ML_E_IO"
    with pytest.raises(FileError, match="it is a folder"):
        open_mlb(tmp_path)


@pytest.mark.parametrize(
    ("data", "where", "message"),
    [
        (b"", "header", "needs 256 bytes, the file is empty"),
        (write(MINIMAL)[:255], "header", "needs 256 bytes, the file has 255 bytes"),
        (b"GGUF" + write(MINIMAL)[4:], "magic", 'must be "MLB1", is "GGUF"'),
        (b"\x1b[2J" + write(MINIMAL)[4:], "magic", 'must be "MLB1", is "\\x1b[2J"'),
    ],
)
def test_not_a_model(tmp_path: Path, data: bytes, where: str, message: str) -> None:
    assert faults_of(tmp_path, data) == [(FORMAT, where, 0, message)]


def test_version(tmp_path: Path) -> None:
    found = faults_of(tmp_path, patched(MINIMAL, version=2))
    assert found == [(FORMAT, "version", 4, "must be 1, is 2; a newer mlb may read it")]


def test_shorter_than_the_arrays(tmp_path: Path) -> None:
    data = write(MINIMAL, pad_last=False)
    assert faults_of(tmp_path, data) == []
    assert faults_of(tmp_path, data[:-1]) == [
        (FORMAT, "wcls", 7744, "ends at byte 7884, the file has 7883; it was cut off, or the header is wrong"),
        (FORMAT, "file", None, "7883 bytes, the header implies 7884"),
    ]


def test_a_huge_body_costs_nothing(tmp_path: Path) -> None:
    sizes = {"dim": 65536, "hidden_dim": 65536, "n_layers": 65536, "vocab": 1 << 24, "n_heads": 65536, "head_dim": 0}
    found = faults_of(tmp_path, patched(replace(MINIMAL, wtype=2), **sizes | {"head_dim": 2, "n_heads": 32768}))
    assert [f[1] for f in found] == ["tok_emb", "file"]


@pytest.mark.parametrize(("index", "row", "column"), [(0, 0, 0), (95, 2, 31), (33, 1, 1)])
def test_minus_128(tmp_path: Path, index: int, row: int, column: int) -> None:
    data = bytearray(write(MINIMAL))
    data[7744 + index] = 0x80
    text = f"Q8_0 quant at row {row}, column {column} is -128, must be -127 to 127"
    assert faults_of(tmp_path, bytes(data)) == [(FORMAT, "wcls", 7744 + index, text)]
    with pytest.raises(FormatError, match="is -128"):
        open_mlb(tmp_path / "m.mlb")


def test_minus_128_is_fine_in_nibbles_and_scales(tmp_path: Path) -> None:
    data = bytearray(write(replace(MINIMAL, wtype=2)))
    data[256] = 0x80
    assert faults_of(tmp_path, bytes(data)) == []


def test_all_faults_are_listed(tmp_path: Path) -> None:
    found = faults_of(tmp_path, patched(MINIMAL, dim=33, vocab=1, norm_eps=-1.0, act=7))
    assert [f[1] for f in found] == ["dim", "n_heads", "vocab", "norm_eps", "act"]


def test_warnings(tmp_path: Path) -> None:
    data = bytearray(write(MINIMAL)) + b"more"
    data[200] = 1  # header padding
    data[353] = 1  # padding between the quants and the scales of tok_emb
    path = tmp_path / "m.mlb"
    path.write_bytes(data)
    report = validate(path)
    assert report.valid
    assert [(w.where, w.offset, w.message) for w in report.warnings] == [
        ("header padding", 160, "is not zero; a newer version may give it a meaning"),
        ("padding after tok_emb", 352, "is not zero"),
        ("file", 7936, "4 bytes after the last array belong to nothing"),
    ]
