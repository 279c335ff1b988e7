"""What plain validation lets pass with a warning, and strict validation does not; and what lies beside a model."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.formats import mli, mlt
from krafla_cli.formats.mlb import Header, tensors
from krafla_cli.formats.sidecar import Sidecar, file_sha256
from krafla_cli.report.validate import validate
from tests.convert.test_importance import DIMENSIONS, filled
from tests.embed.students import header_of, random_model
from tests.formats.test_mlb import FULL, MINIMAL, write
from tests.formats.test_mllm import entry, v2
from tests.helpers import gguf_bytes

NAN, INF = float("nan"), float("inf")


def warnings_of(path: Path, data: bytes) -> list[tuple[str, int | None, str]]:
    """The warnings of a file, which is valid without --strict and has them as faults with it."""
    path.write_bytes(data)
    report, strict = validate(path), validate(path, strict=True)
    assert report.valid, report.faults
    assert [(f.where, f.offset, f.message) for f in strict.faults] == [
        (w.where, w.offset, w.message) for w in report.warnings
    ]
    assert not strict.warnings
    assert strict.status == ("STRICT" if report.warnings else "ML_OK")
    return [(w.where, w.offset, w.message) for w in report.warnings]


def changed(header: Header, name: str, change: Callable[[bytearray, int, int], None]) -> bytes:
    """A file of ``header`` after ``change(data, offset of tensor, offset of its scales)``."""
    data = bytearray(write(header))
    spec = next(t for t in tensors(header) if t.name == name)
    change(data, spec.offset, spec.scale_offset)
    return bytes(data)


def put(code: str, value: float, index: int = 0, scales: bool = False) -> Callable[[bytearray, int, int], None]:
    def change(data: bytearray, offset: int, scale_offset: int) -> None:
        struct.pack_into(code, data, (scale_offset if scales else offset) + index * struct.calcsize(code), value)

    return change


def at(header: Header, name: str) -> tuple[int, int]:
    spec = next(t for t in tensors(header) if t.name == name)
    return spec.offset, spec.scale_offset


F16 = replace(MINIMAL, scale_f16=1)
Q4 = replace(MINIMAL, wtype=2, scale_f16=1)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("role", ["final_norm", "attn_norm", "bq", "A_log", "lconv"])
def test_norms_and_biases(tmp_path: Path, role: str, value: float) -> None:
    header = replace(MINIMAL, qkv_bias=1) if role == "bq" else FULL
    name = next(t.name for t in tensors(header) if t.role == role)
    found = warnings_of(tmp_path / "m.mlb", changed(header, name, put("<f", value, 3)))
    assert (name, at(header, name)[0] + 12, "element 3 is NaN or infinite") in found


@pytest.mark.parametrize(("header", "code"), [(MINIMAL, "<f"), (F16, "<e"), (Q4, "<e")])
@pytest.mark.parametrize("value", [NAN, INF])
def test_scales(tmp_path: Path, header: Header, code: str, value: float) -> None:
    data = changed(header, "layers.0.w1", put(code, value, 2, scales=True))
    n_blocks = header.dim // 32
    row, block = divmod(2, n_blocks)
    place = at(header, "layers.0.w1")[1] + 2 * struct.calcsize(code)
    assert warnings_of(tmp_path / "m.mlb", data) == [
        ("layers.0.w1", place, f"the scale of row {row}, block {block} is NaN or infinite")
    ]


def zero_row(row: int, row_bytes: int, fill: int) -> Callable[[bytearray, int, int], None]:
    def change(data: bytearray, offset: int, _: int) -> None:
        data[offset + row * row_bytes : offset + (row + 1) * row_bytes] = bytes([fill]) * row_bytes

    return change


def test_rows_of_zeros(tmp_path: Path) -> None:
    for header, row_bytes, fill in ((MINIMAL, MINIMAL.dim, 0), (Q4, MINIMAL.dim // 2, 0x88)):
        data = changed(header, "layers.0.wq", zero_row(5, row_bytes, fill))
        assert warnings_of(tmp_path / "m.mlb", data) == [
            ("layers.0.wq", at(header, "layers.0.wq")[0], "row 5 is all zero")
        ]
    scales = changed(F16, "wcls", lambda d, _, s: d.__setitem__(slice(s, s + 4), bytes(4)))
    n_rows = 4 // (2 * MINIMAL.dim // 32)
    text = "row 0 is all zero" if n_rows == 1 else f"{n_rows} rows are all zero, the first is row 0"
    assert warnings_of(tmp_path / "m.mlb", scales) == [("wcls", at(F16, "wcls")[0], text)]


def test_a_good_model_has_no_warnings(tmp_path: Path) -> None:
    for header in (MINIMAL, F16, Q4, FULL):
        assert warnings_of(tmp_path / "m.mlb", write(header)) == []


def test_importance_matrices(tmp_path: Path) -> None:
    imatrix = filled(DIMENSIONS)
    assert warnings_of(tmp_path / "i.mli", imatrix.to_bytes()) == []
    imatrix.classifier_tokens = 0
    imatrix.of(None, mli.CLASSIFIER)[:] = 0
    assert warnings_of(tmp_path / "i.mli", imatrix.to_bytes()) == [
        ("classifier_tokens", 32, "is 0: nothing was recorded there")
    ]
    imatrix = filled(DIMENSIONS)
    imatrix.of(0, "attn_out")[:] = 0
    assert warnings_of(tmp_path / "i.mli", imatrix.to_bytes()) == [
        ("layers.0.attn_out", 40 + 8 * DIMENSIONS.dim, "all sums are 0")
    ]


def test_tokenizers(tmp_path: Path) -> None:
    tokens = tuple(mlt.Token(0, bytes([b])) for b in range(256))
    tokenizer = mlt.Mlt(mlt.Kind.BYTE_LEVEL, mlt.Flag(4), -1, -1, tokens, np.zeros((0, 3), np.uint32))
    assert warnings_of(tmp_path / "t.mlt", mlt.to_bytes(tokenizer)) == [
        ("flags", 28, "4 has no meaning here and is ignored")
    ]


def test_embedding_models(tmp_path: Path) -> None:
    from krafla_cli.formats import lemb

    model = random_model(header_of("int8", "ternary"), 0)
    lemb.write(tmp_path / "good.bin", model)
    assert validate(tmp_path / "good.bin", strict=True).valid
    model.arrays["projection.weight"][1] = 0
    lemb.write(tmp_path / "m.bin", model)
    report = validate(tmp_path / "m.bin")
    assert report.valid
    assert [(w.where, w.message) for w in report.warnings] == [("projection.weight", "row 1 is all zero")]


def gguf_of(values: bytes, padding: bytes = b"") -> bytes:
    tensors_ = [gguf_bytes.description("a", (4, 2), 0, 0), gguf_bytes.description("b", (32,), 8, 64)]
    return gguf_bytes.gguf([gguf_bytes.ARCHITECTURE], tensors_, values[:32].ljust(64, padding or b"\0") + values[32:])


def test_gguf_and_mllm(tmp_path: Path) -> None:
    good = np.ones(8, "<f4").tobytes() + struct.pack("<e32b", 1.0, *range(32))
    path = tmp_path / "m.gguf"
    assert warnings_of(path, gguf_of(good)) == []
    assert [w[2] for w in warnings_of(path, gguf_of(good[:4] + struct.pack("<f", NAN) + good[8:]))] == [
        "element 1 is NaN or infinite"
    ]
    assert [w[2] for w in warnings_of(path, gguf_of(good[:32] + struct.pack("<e", INF) + good[34:]))] == [
        "a scale of block 0 is NaN or infinite"
    ]
    assert [w[2] for w in warnings_of(path, gguf_of(bytes(16) + good[16:]))] == ["row 0 is all zero"]
    assert [w[0] for w in warnings_of(path, gguf_of(good, b"\1"))] == ["padding after a"]
    entries = (entry(0, "a", 0, 64, 532 + 352, (4, 4)),)
    data = np.ones(16, "<f4")
    data[7] = NAN
    assert [w[2] for w in warnings_of(tmp_path / "m.mllm", v2(*entries, data=data.tobytes()))] == [
        "element 7 is NaN or infinite"
    ]


# ---------------------------------------------------------------------------------------------------------------------
# What lies beside a model


def beside(folder: Path, **values: object) -> Path:
    """A model with a sidecar whose document has ``values``."""
    model = folder / "m.mlb"
    model.write_bytes(write(MINIMAL))
    document = json.loads(Sidecar(file_sha256(model)).to_bytes()) | values
    (folder / "m.json").write_text(json.dumps(document))
    return model


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sampling": {"temperature": -1}}, "sampling: temperature must be >= 0, is -1"),
        ({"sampling": {"top_k": 1.5}}, "sampling: top_k must be a whole number >= 0, is 1.5"),
        ({"sampling": {"top_p": 0}}, "sampling: top_p must be above 0 and at most 1, is 0"),
        ({"sampling": {"temperature": 10**400}}, "sampling: temperature must be >= 0, is a number of over 70 digits"),
        ({"sampling": {"temperature": True}}, "sampling: temperature must be one of the numbers, is true"),
        ({"sampling": [1, None]}, "sampling must be an object of numbers, is [1, null]"),
        ({"stop_ids": [1, None]}, "stop_ids must be a list of whole numbers, is [1, null]"),
        ({"stop_ids": 2}, "stop_ids must be a list of whole numbers, is 2"),
        ({"version": None}, "version must be 1, is null"),
        ({"special_tokens": {"bos_token": 1}}, "special_tokens: bos_token must be one of the texts, is 1"),
        ({"chat_template": 3}, "chat_template must be text, is 3"),
    ],
)  # fmt: skip
def test_bad_settings(tmp_path: Path, values: dict[str, object], message: str) -> None:
    report = validate(beside(tmp_path, **values))
    assert [(f.status, f.where, f.message) for f in report.faults] == [
        ("ML_E_FORMAT", "sidecar", f"{tmp_path}/m.json: {message}")
    ]


def test_a_template_that_does_not_compile(tmp_path: Path) -> None:
    report = validate(beside(tmp_path, chat_template="{% if %}"))
    assert [f.status for f in report.faults] == ["ML_E_FORMAT"]
    assert report.faults[0].message.startswith("the chat template, line 1: ")


def test_stop_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    model = beside(tmp_path, stop_ids=[1, MINIMAL.vocab])
    text = f"stop_ids: {MINIMAL.vocab} is no id of the model, which has {MINIMAL.vocab}"
    assert [w.message for w in validate(model).warnings] == [text]
    assert [f.message for f in validate(model, strict=True).faults] == [text]


def test_a_tokenizer_that_is_too_large(tmp_path: Path) -> None:
    model = beside(tmp_path)
    (tmp_path / "m.mlt").write_bytes(mlt.LAYOUT.pack(dict.fromkeys(("version", "kind", "n_merges", "flags"), 1) | {
        "magic": b"MLT1", "n_vocab": MINIMAL.vocab + 1, "bos": -1, "eos": -1}))  # fmt: skip
    text = f"m.mlt has {MINIMAL.vocab + 1} tokens, more than the model's {MINIMAL.vocab}"
    assert [w.message for w in validate(model).warnings] == [text]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.mlb"
    path.write_bytes(changed(MINIMAL, "final_norm", put("<f", NAN)))
    place = f"final_norm at offset {at(MINIMAL, 'final_norm')[0]}: element 0 is NaN or infinite"
    assert run(["validate", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: ok (mlb)\n{path}: warning: {place}\n"
    assert run(["validate", str(path), "--strict"]) == 1
    assert capsys.readouterr().out == f"{path}: STRICT: {place}\n"
    assert run(["validate", str(path), "--strict", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["status"] == "STRICT"
