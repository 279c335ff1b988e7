"""Writing safetensors: the library reads what was written."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from krafla_cli.formats.safetensors import SafetensorsFile
from krafla_cli.formats.safetensors_writer import NewTensor, SafetensorsWriter

TENSORS = [NewTensor("a", "F32", (2, 3)), NewTensor("b", "BF16", (3,))]


def test_the_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([0x3F80, 0xC000, 0], np.uint16)
    with path.open("wb") as file:
        writer = SafetensorsWriter(file, TENSORS)
        writer.write("a", a)
        writer.write("b", b)
        writer.finish()
    loaded = safetensors.torch.load_file(path)
    assert torch.equal(loaded["a"], torch.from_numpy(a))
    assert loaded["b"].tolist() == [1.0, -2.0, 0.0]
    np.testing.assert_array_equal(SafetensorsFile(path).array("b"), b)


def test_bytes() -> None:
    file = io.BytesIO()
    writer = SafetensorsWriter(file, [NewTensor("a", "F32", (1,))])
    writer.write("a", np.float32([2]))
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    assert file.getvalue() == struct.pack("<Q", len(text)) + text + struct.pack("<f", 2)


def test_order_and_sizes() -> None:
    writer = SafetensorsWriter(io.BytesIO(), TENSORS)
    with pytest.raises(ValueError, match="b with 6 bytes written where"):
        writer.write("b", np.zeros(3, np.uint16))
    writer = SafetensorsWriter(io.BytesIO(), TENSORS)
    with pytest.raises(ValueError, match="a with 20 bytes written"):
        writer.write("a", np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="a was never written"):
        SafetensorsWriter(io.BytesIO(), TENSORS).finish()
