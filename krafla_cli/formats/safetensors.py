"""Reading safetensors files: mapped, the header checked against the file before anything is believed.

The published layout: u64 length of the header, a JSON header (name -> dtype, shape, data_offsets relative to the end
of the header), the data. Read here and not through the library since BF16 must come without torch, zero copy.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import FormatError
from krafla_cli.formats.cursor import map_file, release_pages
from krafla_cli.formats.json_file import parse_json
from krafla_cli.formats.text import printable

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
# BF16 has no NumPy type; its bits come as uint16.
_NUMPY: dict[str, type[np.generic]] = {
    "BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64, "I8": np.int8, "U8": np.uint8,
    "I16": np.int16, "I32": np.int32, "I64": np.int64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint file: ``dtype`` as safetensors names it ("BF16"), ``offset`` in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class SafetensorsFile:
    """An open file: ``tensors`` by name, ``array`` for their values."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises FileError (cannot be opened) or FormatError (the header does not describe the file)."""
        self.path = str(path)
        self.data = map_file(path)
        self.tensors = _read_header(self.data, printable(self.path))

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its shape, zero copy; BF16 as uint16 bits. Raises FormatError for types with no array."""
        info = self.tensors[name]
        if info.dtype not in _NUMPY:
            raise FormatError(f"{printable(self.path)}: {printable(name)}: data type {info.dtype} holds no weights")
        return np.frombuffer(self.data, _NUMPY[info.dtype], math.prod(info.shape), info.offset).reshape(info.shape)

    def release(self, name: str) -> None:
        """Gives back the memory that the tensor's pages take up."""
        info = self.tensors[name]
        release_pages(self.data, info.offset, info.n_bytes)


def _read_header(data: memoryview, name: str) -> dict[str, TensorInfo]:
    if len(data) < 8:
        raise FormatError(f"{name}: {len(data)} bytes, a safetensors file begins with 8 bytes of header length")
    n_header = struct.unpack_from("<Q", data)[0]
    if n_header > min(len(data) - 8, MAX_HEADER_BYTES):
        raise FormatError(
            f"{name}: header length at offset 0 is {n_header}, the file has {len(data) - 8} bytes after it"
        )
    document = parse_json(data[8 : 8 + n_header], f"{name}: header")
    if not isinstance(document, dict):
        raise FormatError(f"{name}: the header is not a JSON object")
    start = 8 + n_header
    infos = [_tensor(k, v, start, name) for k, v in document.items() if k != "__metadata__"]
    _check_cover(infos, start, len(data), name)
    return {info.name: info for info in infos}


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(name: str, entry: Any, start: int, file_name: str) -> TensorInfo:
    where = f"{file_name}: {printable(name)}"
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise FormatError(f"{where}: unknown data type {printable(str(dtype))}")
    if not (isinstance(shape, list) and all(_is_size(n) for n in shape)):
        raise FormatError(f"{where}: shape must be a list of sizes, is {printable(str(shape))}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_size(n) for n in offsets)):
        raise FormatError(f"{where}: data_offsets must be two offsets, is {printable(str(offsets))}")
    n_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != n_bytes:
        raise FormatError(
            f"{where}: data_offsets span {offsets[1] - offsets[0]} bytes, {dtype} {shape} needs {n_bytes}"
        )
    return TensorInfo(name, dtype, tuple(shape), start + offsets[0], n_bytes)


def _check_cover(infos: list[TensorInfo], start: int, end: int, name: str) -> None:
    """The tensors must cover the data exactly: no hole, no overlap, nothing after the last."""
    offset = start
    for info in sorted(infos, key=lambda i: (i.offset, i.n_bytes)):
        if info.offset != offset:
            raise FormatError(
                f"{name}: {printable(info.name)} begins at offset {info.offset}, the tensor before it ends at {offset}"
            )
        offset += info.n_bytes
    if offset != end:
        raise FormatError(
            f"{name}: the header describes {offset} bytes, the file has {end}; it was cut off or extended"
        )
