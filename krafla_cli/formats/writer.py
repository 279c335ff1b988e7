"""Writing arrays one after the other, each padded to an alignment, hashed on the way."""

from __future__ import annotations

import hashlib
from typing import Any, BinaryIO, TypeAlias

import numpy.typing as npt

Buffer: TypeAlias = bytes | memoryview | npt.NDArray[Any]


def byte_view(data: Buffer) -> memoryview:
    """The bytes of C-contiguous ``data``, without a copy."""
    view = memoryview(data)  # type: ignore[arg-type] # arrays are buffers, which their type says from Python 3.12 on
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty array cannot be cast


class AlignedWriter:
    """Appends to ``file``; ``offset`` counts the bytes written, ``sha256`` their hash."""

    def __init__(self, file: BinaryIO, alignment: int) -> None:
        self.file = file
        self.alignment = alignment
        self.offset = 0
        self._hash = hashlib.sha256()

    def write(self, data: Buffer) -> None:
        """Appends the bytes of ``data`` (C-contiguous)."""
        flat = byte_view(data)
        self.file.write(flat)
        self._hash.update(flat)
        self.offset += flat.nbytes

    def pad(self) -> None:
        """Appends zeros up to the next aligned offset."""
        self.write(bytes(-self.offset % self.alignment))

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes so far, in hexadecimal."""
        return self._hash.hexdigest()
