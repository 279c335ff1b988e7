"""``mlb export --to mllm``: a version 2 file under Hugging Face names, byte by byte, and the way back."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.errors import FileError
from krafla_cli.export.pipeline import export
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.formats.mllm import validate
from tests.convert.test_pipeline import Remarks
from tests.helpers.checkpoints import CHECKPOINTS, random_model, save


def exported(name: str, folder: Path, **options: Any) -> list[str]:
    """m.mlb and m.mllm in ``folder``; what was told of the export."""
    convert(save(random_model(CHECKPOINTS[name], 0), folder / "hf"), folder / "m.mlb", options=Options(**options))
    remarks = Remarks()
    export(folder / "m.mlb", "mllm", folder / "m.mllm", progress=remarks)
    return remarks.texts


@pytest.mark.parametrize("wtype", ["q4", "q8"])
@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2", "qwen3", "gemma3", "smollm3", "phi3", "glm4", "qwen3_5"])
def test_there_and_back_is_the_same_file(name: str, wtype: str, tmp_path: Path) -> None:
    assert exported(name, tmp_path, wtype=wtype) == []
    report = validate(tmp_path / "m.mllm")
    assert (report.faults, report.warnings) == ([], [])
    options = Options(wtype if name == "qwen3_5" else None)  # its small matrices are Q8_0 always
    convert(tmp_path / "m.mllm", tmp_path / "back.mlb", config=tmp_path / "hf", options=options)
    a, b = (tmp_path / f"{n}.mlb" for n in ("m", "back"))
    if name in ("gemma3", "qwen3_5"):  # (w - 1) + 1 may round
        model, again = open_mlb(a), open_mlb(b)
        assert again.header == model.header
        for spec in model.tensors.values():
            if spec.is_quantized:
                np.testing.assert_array_equal(model.quantized(spec.name).q, again.quantized(spec.name).q)
                np.testing.assert_array_equal(model.quantized(spec.name).d, again.quantized(spec.name).d)
            elif spec.role != "layer_flags":
                np.testing.assert_allclose(model.float32(spec.name), again.float32(spec.name), rtol=3e-7, atol=1e-7)
    else:
        assert a.read_bytes() == b.read_bytes()


def descriptors(data: bytes) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Name -> type, shape, bytes; read with nothing but the layout of the format."""
    magic, version, count, first = struct.unpack_from("<ii512xIQ", data)
    assert (magic, version, first) == (0x519A, 2, 532)
    found = {}
    for i in range(count):
        number, kind, n_bytes, offset, rank = struct.unpack_from("<IIQQQ", data, first + 352 * i)
        assert number == i
        shape = struct.unpack_from(f"<{rank}i", data, first + 352 * i + 32)
        name = data[first + 352 * i + 96 : first + 352 * (i + 1)].split(b"\0", 1)[0].decode()
        found[name] = (kind, shape, data[offset : offset + n_bytes])
    return found


@pytest.mark.parametrize(("wtype", "kind", "n_quants"), [("q4", 2, 16), ("q8", 8, 32)])
def test_bytes_of_the_file(wtype: str, kind: int, n_quants: int, tmp_path: Path) -> None:
    """Every block of q_proj, rows in halves again, and of down_proj as it is; a norm as floats."""
    exported("llama", tmp_path, wtype=wtype)
    model, file = open_mlb(tmp_path / "m.mlb"), descriptors((tmp_path / "m.mllm").read_bytes())
    assert len(file) == len(model.tensors)
    h = model.header
    for name, role, rows in (
        ("model.layers.1.self_attn.q_proj.weight", "layers.1.wq", h.q_dim),
        ("model.layers.1.mlp.down_proj.weight", "layers.1.w2", h.dim),
    ):
        matrix = model.quantized(role)
        stored_kind, shape, data = file[name]
        assert (stored_kind, shape) == (kind, matrix.shape)
        blocks = np.frombuffer(data, np.uint8).reshape(rows, -1, 2 + n_quants)
        for row in range(rows):
            ours = row
            if role.endswith("wq"):  # row i of a half is row 2i of the pairs, the other half's 2i + 1
                head, i = divmod(row, h.head_size)
                half = h.head_size // 2
                ours = head * h.head_size + (2 * i if i < half else 2 * (i - half) + 1)
            assert blocks[row, :, :2].tobytes() == matrix.d[ours].tobytes()
            assert blocks[row, :, 2:].tobytes() == matrix.q[ours].tobytes()
    norm = file["model.layers.1.input_layernorm.weight"]
    assert norm == (0, (h.dim,), model.float32("layers.1.attn_norm").tobytes())


def test_what_does_not_fit_is_written_as_floats(tmp_path: Path) -> None:
    """An FFN of 172: its columns are no whole blocks without the padding."""
    remarks = exported("llama-ffn172", tmp_path, wtype="q8")
    assert remarks == [
        "written as F32, since their blocks do not fit: 3 matrices (model.layers.0.mlp.down_proj.weight, ...)"
    ]
    kind, shape, data = descriptors((tmp_path / "m.mllm").read_bytes())["model.layers.0.mlp.down_proj.weight"]
    matrix = open_mlb(tmp_path / "m.mlb").quantized("layers.0.w2")
    values = (matrix.q.reshape(64, 6, 32) * matrix.d[:, :, None].astype(np.float32)).reshape(64, 192)[:, :172]
    assert (kind, shape) == (0, (64, 172))
    np.testing.assert_array_equal(np.frombuffer(data, "<f4").reshape(shape), values)


def test_f32_scales_are_rounded(tmp_path: Path) -> None:
    (remark,) = exported("qwen3", tmp_path, wtype="q4", scales="f32")
    assert remark.startswith("float32 scales of 22 matrices were rounded to f16: relative error of the weights ")
    assert 0 < float(remark.split()[-1]) < 1e-3


def test_without_settings_the_kind_is_told(tmp_path: Path) -> None:
    """A Helium model is written as the Llama model that computes the same; a config of Helium would misread it."""
    assert exported("helium", tmp_path) == []
    (tmp_path / "m.json").unlink()
    remarks = Remarks()
    export(tmp_path / "m.mlb", "mllm", tmp_path / "n.mllm", progress=remarks)
    assert remarks.texts == [
        "warning: no settings say what the model was: names and rows are those of a llama checkpoint"
    ]
    assert (tmp_path / "n.mllm").read_bytes() != (tmp_path / "m.mllm").read_bytes()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    exported("llama", tmp_path, wtype="q8")
    with pytest.raises(FileError, match=r"m.mllm exists already"):
        export(tmp_path / "m.mlb", "mllm", tmp_path / "m.mllm")
