"""The .mlb header and body against bytes written by hand from the specification's tables."""

from __future__ import annotations

import io
import struct
from dataclasses import replace

import numpy as np
import pytest

from krafla_cli.errors import FormatError
from krafla_cli.formats.mlb import Header, tensors
from krafla_cli.formats.mlb_file import MlbWriter, open_mlb

# A header with another value in each field, in the order and at the offsets of the specification.
GOLDEN = struct.pack(
    "<4s 8I 2f 3I 3f I 4I f 2I f 2I 2f I 2f 7I",
    b"MLB1",
    *(1, 64, 2, 4, 2, 96, 40, 128),  # version, dim, n_layers, n_heads, n_kv_heads, hidden_dim, vocab, max_seq
    *(500000.0, 0.25),  # rope_theta, norm_eps
    *(2, 1, 3),  # wtype, shared_classifier, rope_type
    *(4.0, 32.0, 1.0, 64),  # rope_factor, low, high, orig
    *(80, 1, 16, 1),  # q8_mask, qkv_bias, head_dim, qk_norm
    *(1.5, 9, 1, 2500.0),  # rope_attn_factor, sliding_window, layer_flags, rope_local_theta
    *(1, 1, 8.0, 0.125, 1, 50.0, 30.0),  # act, post_norms, embed_scale, attn_scale, scale_f16, softcaps
    *(8, 1, 2, 4, 8, 16, 4),  # rot_dim, attn_gate, lin_k_heads, lin_v_heads, lin_k_dim, lin_v_dim, lin_conv
).ljust(256, b"\0")

FULL = Header(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=96,
    vocab=40,
    max_seq=128,
    rope_theta=500000.0,
    norm_eps=0.25,
    wtype=2,
    shared_classifier=1,
    rope_type=3,
    rope_factor=4.0,
    rope_low_freq_factor=32.0,
    rope_high_freq_factor=1.0,
    rope_orig_max_seq=64,
    q8_mask=80,
    qkv_bias=1,
    head_dim=16,
    qk_norm=1,
    rope_attn_factor=1.5,
    sliding_window=9,
    layer_flags=1,
    rope_local_theta=2500.0,
    act=1,
    post_norms=1,
    embed_scale=8.0,
    attn_scale=0.125,
    scale_f16=1,
    attn_softcap=50.0,
    final_softcap=30.0,
    rot_dim=8,
    attn_gate=1,
    lin_k_heads=2,
    lin_v_heads=4,
    lin_k_dim=8,
    lin_v_dim=16,
    lin_conv=4,
    flags=bytes([3, 8]),
)
MINIMAL = Header(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=32, vocab=3, max_seq=8, wtype=1)


def write(header: Header, pad_last: bool = True) -> bytes:
    """A file of ``header`` whose tensors hold the bytes 1, 2, 3, ..."""
    out = io.BytesIO()
    writer = MlbWriter(out, header)
    for spec in tensors(header):
        if spec.role == "layer_flags":
            continue
        arrays = [np.arange(1, spec.n_bytes + 1, dtype=np.uint64).astype(np.uint8) % 100]
        if spec.is_quantized:
            arrays.append(np.ones(spec.scale_bytes, np.uint8))
        writer.write(spec.name, *arrays)
    writer.finish(pad_last)
    return out.getvalue()


def test_header_bytes() -> None:
    assert FULL.to_bytes() == GOLDEN
    assert replace(Header.from_bytes(GOLDEN), flags=FULL.flags) == FULL


def test_derived_values() -> None:
    assert (FULL.head_size, FULL.q_dim, FULL.kv_dim, FULL.rot_size, FULL.score_scale) == (16, 64, 32, 8, 0.125)
    assert (FULL.lin_v_size, FULL.lin_qkv_size) == (64, 2 * 2 * 8 + 64)
    assert (MINIMAL.head_size, MINIMAL.rot_size, MINIMAL.score_scale) == (16, 16, 0.25)
    assert [FULL.window_of(i) for i in range(2)] == [9, 0]
    assert replace(MINIMAL, sliding_window=5).window_of(0) == 5


def test_files_from_before_a_field_existed() -> None:
    old = bytearray(MINIMAL.to_bytes())
    old[52:] = bytes(len(old) - 52)  # written when the header ended after shared_classifier
    header = Header.from_bytes(bytes(old))
    assert (header.rope_type, header.head_size, header.scale_f16, header.rot_size) == (0, 16, 0, 16)
    assert [t.encoding for t in tensors(header) if t.role == "wq"] == ["q8_0"]


def test_tensors_of_a_small_model() -> None:
    places = [(t.name, t.shape, t.offset, t.n_bytes, t.scale_offset, t.scale_bytes) for t in tensors(MINIMAL)]
    assert places == [
        ("tok_emb", (3, 32), 256, 96, 384, 12),
        ("layers.0.attn_norm", (32,), 448, 128, 0, 0),
        ("layers.0.wq", (32, 32), 576, 1024, 1600, 128),
        ("layers.0.wk", (16, 32), 1728, 512, 2240, 64),
        ("layers.0.wv", (16, 32), 2304, 512, 2816, 64),
        ("layers.0.wo", (32, 32), 2880, 1024, 3904, 128),
        ("layers.0.ffn_norm", (32,), 4032, 128, 0, 0),
        ("layers.0.w1", (32, 32), 4160, 1024, 5184, 128),
        ("layers.0.w2", (32, 32), 5312, 1024, 6336, 128),
        ("layers.0.w3", (32, 32), 6464, 1024, 7488, 128),
        ("final_norm", (32,), 7616, 128, 0, 0),
        ("wcls", (3, 32), 7744, 96, 7872, 12),
    ]


def test_order_of_every_optional_array() -> None:
    names = [t.name for t in tensors(FULL)]
    assert names == [
        "layer_flags",
        "tok_emb",
        *(
            f"layers.0.{role}"
            for role in "attn_norm wq wk wv wo wg bq bk bv q_norm k_norm ffn_norm w1 w2 w3 post_attn_norm "
            "post_ffn_norm".split()
        ),
        *(
            f"layers.1.{role}"
            for role in "attn_norm lqkv lz lb la lconv dt_bias A_log lnorm lout ffn_norm w1 w2 w3 post_attn_norm "
            "post_ffn_norm".split()
        ),
        "final_norm",
    ]


def test_shapes_and_encodings_of_linear_attention() -> None:
    of = {t.role: (t.shape, t.encoding, t.n_bytes, t.scale_bytes) for t in tensors(FULL) if t.layer == 1}
    assert of["lqkv"] == ((96, 64), "q4_0", 3072, 384)
    assert of["lz"] == ((64, 64), "q4_0", 2048, 256)
    assert of["lb"] == of["la"] == ((4, 64), "q8_0", 256, 16)  # always Q8_0
    assert of["lconv"] == ((96, 4), "f32", 1536, 0)
    assert of["lnorm"] == ((16,), "f32", 64, 0)
    assert of["lout"] == ((64, 64), "q8_0", 4096, 256)  # mask bit 16
    assert of["w2"][1] == "q8_0"  # mask bit 64


@pytest.mark.parametrize(
    ("mask", "shared", "roles"),
    [
        (1, 0, {"tok_emb"}),
        (1, 1, {"tok_emb"}),
        (2, 0, {"wcls"}),
        (2, 1, {"tok_emb"}),
        (4, 0, {"wq", "wk", "wg", "lqkv"}),
        (8, 0, {"wv", "lz"}),
        (16, 0, {"wo", "lout"}),
        (32, 0, {"w1", "w3"}),
        (64, 0, {"w2"}),
        (127, 0, {"tok_emb", "wcls", "wq", "wk", "wg", "lqkv", "wv", "lz", "wo", "lout", "w1", "w3", "w2"}),
        (0, 0, set()),
    ],
)
def test_q8_mask(mask: int, shared: int, roles: set[str]) -> None:
    specs = tensors(replace(FULL, q8_mask=mask, shared_classifier=shared))
    assert {t.role for t in specs if t.encoding == "q8_0"} - {"lb", "la"} == roles


@pytest.mark.parametrize("header", [FULL, MINIMAL, replace(FULL, scale_f16=0)])
def test_every_array_is_aligned_and_none_overlap(header: Header) -> None:
    end = 256
    for spec in tensors(header):
        assert spec.offset % 64 == 0
        assert 0 <= spec.offset - end < 64
        if spec.is_quantized:
            assert spec.scale_offset % 64 == 0
            assert 0 <= spec.scale_offset - (spec.offset + spec.n_bytes) < 64
        end = spec.end


def test_written_and_read_back(tmp_path) -> None:
    path = tmp_path / "m.mlb"
    path.write_bytes(write(FULL))
    model = open_mlb(path)
    assert model.header == FULL
    wq = model.quantized("layers.0.wq")
    assert (wq.encoding, wq.q.dtype, wq.q.shape, wq.d.dtype, wq.d.shape) == (
        "q4_0",
        np.uint8,
        (64, 32),
        np.float16,
        (64, 2),
    )
    assert list(wq.q[0, :3]) == [1, 2, 3]
    lb = model.quantized("layers.1.lb")
    assert (lb.q.dtype, lb.q.shape, lb.shape) == (np.int8, (4, 64), (4, 64))
    assert model.float32("layers.1.lconv").shape == (96, 4)


def test_the_last_padding_is_optional(tmp_path) -> None:
    path = tmp_path / "m.mlb"
    padded, bare = write(MINIMAL), write(MINIMAL, pad_last=False)
    assert (len(padded), len(bare)) == (7936, 7884)
    assert padded == bare.ljust(7936, b"\0")
    path.write_bytes(bare)
    assert open_mlb(path).header.dim == 32


def test_views_do_not_copy(tmp_path) -> None:
    path = tmp_path / "m.mlb"
    path.write_bytes(write(MINIMAL))
    model = open_mlb(path)
    assert not model.quantized("tok_emb").q.flags.owndata
    assert not model.quantized("tok_emb").q.flags.writeable


def test_writer_refuses_wrong_order_and_size() -> None:
    writer = MlbWriter(io.BytesIO(), MINIMAL)
    with pytest.raises(ValueError, match="final_norm written where tok_emb belongs"):
        writer.write("final_norm", np.zeros(32, np.float32))
    with pytest.raises(ValueError, match=r"tok_emb: \(96, 11\) bytes, the header implies \(96, 12\)"):
        writer.write("tok_emb", np.zeros(96, np.int8), np.zeros(11, np.uint8))
    with pytest.raises(ValueError, match="tok_emb was never written"):
        writer.finish()


def test_writer_refuses_a_header_that_breaks_a_rule() -> None:
    with pytest.raises(FormatError, match="rope_theta at offset 36: must be > 0, is 0"):
        MlbWriter(io.BytesIO(), replace(MINIMAL, rope_theta=0.0))
