"""Bounded reading of files: mapped read-only, every length checked against the file before it is used."""

from __future__ import annotations

import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO

from krafla_cli.errors import FileError, FormatError, os_reason
from krafla_cli.formats.text import printable

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading. A pipe would block, a device would not end. Raises FileError."""
    name = printable(str(path))
    try:
        mode = Path(path).stat().st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise FileError(f"cannot open {name}: it is {what}")
        return Path(path).open("rb")
    except OSError as error:
        raise FileError(f"cannot open {name}: {os_reason(error)}") from error
    except ValueError as error:  # a NUL character in the name
        raise FileError(f"cannot open {name}: {error}") from error


def map_file(path: str | os.PathLike[str]) -> memoryview:
    """The file's bytes, mapped read-only (shared between processes, read on demand).

    An empty file gives an empty view. Raises FileError when it cannot be opened, is no regular file, or is the pointer
    that Git LFS leaves in place of a file.
    """
    with open_regular(path) as f:
        try:
            if os.fstat(f.fileno()).st_size == 0:
                return memoryview(b"")
            data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise FileError(f"cannot map {printable(str(path))}: {os_reason(error)}") from error
    if data[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise FileError(f"{printable(str(path))}: is a Git LFS pointer and not the file itself; fetch it: git lfs pull")
    return data


def release_pages(data: memoryview, start: int, n_bytes: int) -> None:
    """Lets the system take back the memory of a stretch of a mapped file that is done with; reading it again works."""
    mapped = data.obj
    if not isinstance(mapped, mmap.mmap) or not hasattr(mapped, "madvise"):
        return
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    n_whole = (start + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if n_whole > 0:
        mapped.madvise(mmap.MADV_DONTNEED, first, n_whole)


class Cursor:
    """A position in a buffer that never reads past its end.

    ``name`` is the file's name, for errors. Every read raises FormatError that names the field, its offset,
    the bytes needed and the bytes left.
    """

    def __init__(self, data: memoryview | bytes, name: str, offset: int = 0, end: int | None = None) -> None:
        self.data = memoryview(data)
        self.name = name
        self.offset = offset
        self.end = len(self.data) if end is None else end

    @property
    def n_left(self) -> int:
        return self.end - self.offset

    def take(self, n_bytes: int, what: str) -> memoryview:
        """The next ``n_bytes``, without a copy."""
        if n_bytes > self.n_left:
            raise FormatError(
                f"{printable(self.name)}: {printable(what)} at offset {self.offset}: needs {n_bytes} bytes, "
                f"the file has {self.n_left} left"
            )
        start = self.offset
        self.offset += n_bytes
        return self.data[start : self.offset]

    def unpack(self, code: str, what: str) -> tuple[Any, ...]:
        """The next little-endian values of the struct ``code``."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))

    def u8(self, what: str) -> int:
        return int(self.unpack("B", what)[0])

    def u16(self, what: str) -> int:
        return int(self.unpack("H", what)[0])

    def u32(self, what: str) -> int:
        return int(self.unpack("I", what)[0])

    def i32(self, what: str) -> int:
        return int(self.unpack("i", what)[0])

    def u64(self, what: str) -> int:
        return int(self.unpack("Q", what)[0])
