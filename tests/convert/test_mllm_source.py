"""MLLM files as sources: Hugging Face names, shapes from the file or from the config, blocks of any type."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.errors import DataError, FileError, ShapeError, UnsupportedError, UsageError
from krafla_cli.formats.data_types import BY_NAME
from krafla_cli.formats.mllm import MllmWriter, NewTensor
from krafla_cli.quant.types import dequantize, quantize
from tests.convert.test_gguf_source import mlb_weights
from tests.convert.test_pipeline import Remarks
from tests.formats.test_mllm import v1
from tests.helpers import llama
from tests.helpers.checkpoints import CHECKPOINTS, random_model, save


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2")
    if kind in ("F32", "F16"):
        return values.astype("<f4" if kind == "F32" else "<f2")
    if kind in ("Q4_0", "Q8_0", "MXFP4"):
        return quantize(values, BY_NAME[kind])
    return np.asarray(gguf.quantize(values, gguf.GGMLQuantizationType[kind]))


def write(path: Path, weights: dict[str, np.ndarray], kind: str, version: int = 2) -> Path:
    """Matrices as ``kind``, vectors as F32."""
    kinds = {name: kind if array.ndim == 2 else "F32" for name, array in weights.items()}
    data = {name: np.ascontiguousarray(stored(array, kinds[name])) for name, array in weights.items()}
    if version == 1:
        path.write_bytes(v1(*((n, d.tobytes(), BY_NAME[kinds[n]].mllm) for n, d in data.items())))
        return path
    file = io.BytesIO()
    writer = MllmWriter(file, "m", [NewTensor(n, BY_NAME[kinds[n]], a.shape) for n, a in weights.items()])
    for name, array in data.items():
        writer.write(name, array)
    path.write_bytes(file.getvalue())
    return path


def state(name: str, folder: Path) -> dict[str, np.ndarray]:
    model = random_model(CHECKPOINTS[name], 0)
    save(model, folder)
    tied = model.config.tie_word_embeddings
    return {k: v.numpy() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "qwen3_5", "llama-ffn172"])
def test_gives_the_bytes_that_the_checkpoint_gives(name: str, version: int, tmp_path: Path) -> None:
    """Both versions; the first has no shapes, not even of a convolution."""
    weights = state(name, tmp_path / "hf")
    path = write(tmp_path / "m.mllm", weights, "F32", version) if name != "qwen3_5" else None
    if path is None:  # its convolution has three axes
        flat = {k: v.reshape(-1) if v.ndim == 3 and version == 1 else v for k, v in weights.items()}
        path = write(tmp_path / "m.mllm", flat, "F32", version)
    convert(tmp_path / "hf", tmp_path / "a.mlb", options=Options("q8"))
    convert(path, tmp_path / "b.mlb", config=tmp_path / "hf", options=Options("q8"))
    assert (tmp_path / "a.mlb").read_bytes() == (tmp_path / "b.mlb").read_bytes()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_blocks_are_copied(kind: str, version: int, tmp_path: Path) -> None:
    weights = llama.tensors()
    folder = llama.write(tmp_path / "hf", weights=weights)
    remarks = Remarks()
    path = write(tmp_path / "m.mllm", weights, kind, version)
    result = convert(path, tmp_path / "m.mlb", config=folder, progress=remarks)
    assert "copied block by block, without loss: 16 of 16 matrices" in remarks.texts
    assert result.options.wtype == kind[:2].lower()
    for tensor in result.plan.tensors:
        if tensor.spec.is_quantized:
            w = weights[tensor.source]
            want = dequantize(quantize(w, BY_NAME[kind]), BY_NAME[kind], w.shape)
            want = want if tensor.rows is None else want[tensor.rows]
            np.testing.assert_array_equal(mlb_weights(tmp_path / "m.mlb", tensor.spec.name), want)


@pytest.mark.parametrize("kind", ["MXFP4", "BF16", "F16", "Q4_1"])
def test_other_types_are_decoded(kind: str, tmp_path: Path) -> None:
    weights = llama.tensors()
    folder = llama.write(tmp_path / "hf", weights=weights)
    convert(write(tmp_path / "m.mllm", weights, kind), tmp_path / "a.mlb", config=folder)
    decoded = {
        k: dequantize(np.ascontiguousarray(stored(v, kind)).view(np.uint8), BY_NAME[kind], v.shape)
        if v.ndim == 2
        else v
        for k, v in weights.items()
    }
    convert(llama.write(tmp_path / "decoded", weights=decoded), tmp_path / "b.mlb")
    assert (tmp_path / "a.mlb").read_bytes() == (tmp_path / "b.mlb").read_bytes()


def interleaved(values: np.ndarray) -> bytes:
    """Q4_0_4_4: 4 rows at a time, their quants in turns of 4 bytes, nibbles as two's complement."""
    blocks = quantize(values, BY_NAME["Q4_0"]).reshape(len(values), -1, 18)
    out = bytearray()
    for first in range(0, len(blocks), 4):
        for b in range(blocks.shape[1]):
            group = blocks[first : first + 4, b]
            out += group[:, :2].tobytes()
            for i in range(2, 18, 4):
                out += (group[:, i : i + 4] ^ 0x88).tobytes()
    return bytes(out)


def test_interleaved_blocks_are_copied_too(tmp_path: Path) -> None:
    weights = llama.tensors()
    folder = llama.write(tmp_path / "hf", weights=weights)
    entries = [
        (n, interleaved(a) if a.ndim == 2 else a.tobytes(), 19 if a.ndim == 2 else 0) for n, a in weights.items()
    ]
    (tmp_path / "m.mllm").write_bytes(v1(*entries))
    remarks = Remarks()
    convert(tmp_path / "m.mllm", tmp_path / "a.mlb", config=folder, progress=remarks)
    assert "copied block by block, without loss: 16 of 16 matrices" in remarks.texts
    convert(write(tmp_path / "plain.mllm", weights, "Q4_0"), tmp_path / "b.mlb", config=folder)
    assert (tmp_path / "a.mlb").read_bytes() == (tmp_path / "b.mlb").read_bytes()


@pytest.mark.parametrize(
    ("kind", "n_bytes", "message"),
    [
        ("Q1_K", 100, "Q1_K: the layout of its blocks is not published"),
        ("BYTE", 4096, "BYTE: it holds bytes whose meaning only their writer knows"),
        ("Q8_PERTENSOR", 4096, "Q8_PERTENSOR: its scale is not in the tensor"),
    ],
)
def test_types_without_weights_are_refused(kind: str, n_bytes: int, message: str, tmp_path: Path) -> None:
    weights = llama.tensors()
    folder = llama.write(tmp_path / "hf", weights=weights)
    name, path = "model.layers.0.self_attn.q_proj.weight", tmp_path / "m.mllm"
    entries = [(n, a.tobytes() if n != name else bytes(n_bytes), 0 if n != name else BY_NAME[kind].mllm or 0)
               for n, a in weights.items()]  # fmt: skip
    if kind == "BYTE":  # version 2 only
        write(path, weights | {name: np.zeros((64, 64), np.float32)}, "F32")
        data = bytearray(path.read_bytes())
        at = data.index(name.encode()) - 96
        data[at + 4 : at + 16] = struct.pack("<IQ", 134, n_bytes)
        path.write_bytes(data)
    else:
        path.write_bytes(v1(*entries))
    with pytest.raises(UnsupportedError, match=f"q_proj.weight: {message}"):
        convert(path, tmp_path / "m.mlb", config=folder)


def test_an_embedding_of_unknown_layout(tmp_path: Path) -> None:
    weights = llama.tensors()
    folder = llama.write(tmp_path / "hf", weights=weights)
    (tmp_path / "m.mllm").write_bytes(v1(*((n, a.tobytes(), BY_NAME["Q1_K"].mllm or 0) for n, a in weights.items())))
    with pytest.raises(UnsupportedError, match="Q1_K: the layout of its blocks is not published"):
        convert(tmp_path / "m.mllm", tmp_path / "m.mlb", config=folder)


def test_mxfp4_scale_of_nan(tmp_path: Path) -> None:
    weights = llama.tensors()
    folder = llama.write(tmp_path / "hf", weights=weights)
    path = write(tmp_path / "m.mllm", weights, "MXFP4")
    data = bytearray(path.read_bytes())
    offset = struct.unpack_from("<Q", data, 532 + 16)[0]
    data[offset + 16] = 255
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"m.mllm: model.embed_tokens.weight: MXFP4 block 0: scale 255 stands for NaN"):
        convert(path, tmp_path / "m.mlb", config=folder)
    assert not (tmp_path / "m.mlb").exists()


def test_sizes_must_fit_the_config(tmp_path: Path) -> None:
    weights = llama.tensors()
    folder = llama.write(tmp_path / "hf", llama.CONFIG | {"intermediate_size": 64}, weights)
    for version in (1, 2):
        with pytest.raises(ShapeError, match=r"gate_proj.weight has shape \[.*\], must be \[64, 64\]"):
            convert(write(tmp_path / "m.mllm", weights, "F32", version), tmp_path / "m.mlb", config=folder)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = llama.tensors()
    folder = llama.write(tmp_path / "hf", weights=weights)
    path = write(tmp_path / "m.mllm", weights, "Q4_0")
    out = str(tmp_path / "m.mlb")
    assert run(["convert", str(path), "--config", str(folder), "-o", out]) == 0
    assert run(["validate", out]) == 0
    capsys.readouterr()
    assert run(["convert", str(path), "-o", out]) == 2
    assert "needs --config DIR, the folder of its config.json" in capsys.readouterr().err
    with pytest.raises(FileError, match="no such folder"):
        convert(path, config=tmp_path / "none")
    with pytest.raises(FileError, match=r"no config.json"):
        convert(path, config=tmp_path)
    with pytest.raises(UsageError):
        convert(path)
