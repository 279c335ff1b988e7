"""safetensors headers that do not describe their file, and values equal to the safetensors library's."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from krafla_cli.errors import FileError, FormatError
from krafla_cli.formats.safetensors import SafetensorsFile


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start: int = 0, end: int = 8, dtype: str = "F32", shape: tuple[Any, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def test_values_equal_the_library(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "b": torch.randn(7, dtype=torch.float16),
        "c": torch.randn(2, 2),
        "empty": torch.zeros(0, 4),
    }
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert {k: (i.dtype, i.shape) for k, i in file.tensors.items()} == {
        "a": ("BF16", (3, 5)),
        "b": ("F16", (7,)),
        "c": ("F32", (2, 2)),
        "empty": ("F32", (0, 4)),
    }
    widened = (file.array("a").astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(widened, tensors["a"].float().numpy())
    assert np.array_equal(file.array("b"), tensors["b"].numpy())
    assert np.array_equal(file.array("c"), tensors["c"].numpy())


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 9)}, bytes(9), "a: data_offsets span 9 bytes, F32 [2] needs 8"),
        ({"a": entry(8, 16)}, bytes(16), "a begins at offset"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "b begins at offset"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20), "b begins at offset"),
        ({"a": entry()}, bytes(7), "the header describes"),
        ({"a": entry()}, bytes(108), "it was cut off or extended"),
        ({"a": entry(dtype="Q4")}, bytes(8), "a: unknown data type Q4"),
        ({"a": entry() | {"dtype": ["F32"]}}, bytes(8), "a: unknown data type ['F32']"),
        ({"a": entry(shape=(-2,))}, bytes(8), "a: shape must be a list of sizes, is [-2]"),
        ({"a": entry(shape=(2.0,))}, bytes(8), "a: shape must be a list of sizes, is [2.0]"),
        ({"a": entry(shape=(True, 2))}, bytes(8), "a: shape must be a list of sizes"),
        ({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(8), "a: data_offsets span 8 bytes, F32"),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "a: data_offsets must be two offsets, is None"),
        ({"a": 3}, b"", "a: its header entry is not an object"),
        ({"\x1b[31m": 3}, b"", "\\x1b[31m: its header entry is not an object"),
        ([1], b"", "the header is not a JSON object"),
        (b'{"a": 1, "a": 2}', b"", 'header: key "a" occurs twice'),
        (b"{", b"", "header: not JSON"),
        (b"\xff", b"", "header: not UTF-8 at byte 0"),
        (b"[" * 100000, b"", "header: JSON nested 100000 deep, at most 100 are read"),
    ],
)
def test_hostile_headers(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as raised:
        SafetensorsFile(write(tmp_path / "m.safetensors", header, data))
    assert message in str(raised.value)


@pytest.mark.parametrize("length", [100, (1 << 62), (1 << 64) - 1])
def test_header_length_is_checked_before_use(tmp_path: Path, length: int) -> None:
    with pytest.raises(FormatError, match=f"header length at offset 0 is {length}, the file has 2 bytes after it"):
        SafetensorsFile(write(tmp_path / "m.safetensors", {}, length=length))


def test_short_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234567")
    with pytest.raises(FormatError, match="7 bytes, a safetensors file begins with 8 bytes"):
        SafetensorsFile(tmp_path / "short")
    with pytest.raises(FileError, match="No such file"):
        SafetensorsFile(tmp_path / "none")
