"""Writing safetensors files front to back: the header first, then one tensor at a time.

The library's own writer wants all tensors in memory at once.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from krafla_cli.formats.writer import Buffer, byte_view

_ITEM_BYTES = {"F32": 4, "BF16": 2}


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; ``dtype`` is "F32" or "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class SafetensorsWriter:
    """Wrong order and wrong sizes are defects of the caller and raise ValueError."""

    def __init__(self, file: BinaryIO, tensors: Sequence[NewTensor]) -> None:
        self._file = file
        self._next = iter(tensors)
        document: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for t in tensors:
            span = [offset, offset + t.n_bytes]
            document[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": span}
            offset += t.n_bytes
        header = json.dumps(document, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # the data begin at a multiple of 8, as the library has it
        file.write(struct.pack("<Q", len(header)) + header)

    def write(self, name: str, data: Buffer) -> None:
        """Appends the bytes of tensor ``name``, C-contiguous."""
        tensor, flat = next(self._next, None), byte_view(data)
        if tensor is None or tensor.name != name or tensor.n_bytes != flat.nbytes:
            raise ValueError(f"{name} with {flat.nbytes} bytes written where {tensor or 'the end'} belongs")
        self._file.write(flat)

    def finish(self) -> None:
        """Checks that every tensor has been written."""
        tensor = next(self._next, None)
        if tensor is not None:
            raise ValueError(f"{tensor.name} was never written")
