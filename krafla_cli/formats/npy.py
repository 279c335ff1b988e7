""".npy files (NumPy's format 1.0): written row by row, and mapped with their shape checked before it is used."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import FormatError
from krafla_cli.formats.atomic import atomic_output
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.text import printable, printable_bytes

HEADER_BYTES = 128  # room for any shape, so that the number of rows can be filled in at the end
_MAGIC = b"\x93NUMPY\x01\x00"
_FIXED_BYTES = len(_MAGIC) + 2
# What NumPy writes of arrays with one or two dimensions, and nothing else: no expression is evaluated.
_HEADER = re.compile(
    rb"\{'descr': '([<|][a-z]\d)', 'fortran_order': False, 'shape': \((\d{1,15}),(?: (\d{1,15}))?\),? ?\} *\n"
)


def npy_header(descr: str, shape: tuple[int, ...]) -> bytes:
    """The first HEADER_BYTES bytes of a .npy file of C order; ``descr`` is NumPy's name of a type, "<f4"."""
    text = repr({"descr": descr, "fortran_order": False, "shape": shape})
    n_text = HEADER_BYTES - _FIXED_BYTES
    return _MAGIC + n_text.to_bytes(2, "little") + text.ljust(n_text - 1).encode("ascii") + b"\n"


@contextlib.contextmanager
def float32_rows(
    target: str | os.PathLike[str], n_rows: int, n_cols: int, force: bool = False, inputs: tuple[Path, ...] = ()
) -> Iterator[Callable[[npt.NDArray[np.float32]], None]]:
    """Gives a function that appends rows [n, n_cols] to a float32 .npy of [n_rows, n_cols].

    The file appears when the block ends without an error and all rows are there (ValueError otherwise). Raises
    FileError as :func:`~krafla_cli.formats.atomic.atomic_output`.
    """
    n_written = 0
    with atomic_output(target, force, inputs) as f:
        f.write(npy_header("<f4", (n_rows, n_cols)))

        def append(rows: npt.NDArray[np.float32]) -> None:
            nonlocal n_written
            f.write(np.ascontiguousarray(rows, "<f4").data)
            n_written += len(rows)

        yield append
        if n_written != n_rows:
            raise ValueError(f"{n_written} of {n_rows} rows were written")


def map_npy(path: str | os.PathLike[str], descr: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The array in ``path``, mapped read-only; it must have this type and shape, and the file nothing else.

    Raises FileError, FormatError.
    """
    data, name = map_file(path), printable(str(path))
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise FormatError(f'{name}: begins with "{printable_bytes(bytes(data[:6]))}", must be a .npy file, version 1.0')
    n_text = int.from_bytes(data[len(_MAGIC) : _FIXED_BYTES], "little")
    start = _FIXED_BYTES + n_text
    text = bytes(data[_FIXED_BYTES:start])
    match = _HEADER.fullmatch(text)
    if match is None:
        raise FormatError(f"{name}: the header at offset {_FIXED_BYTES} is no array's of this format")
    found = match[1].decode(), tuple(int(n) for n in match.groups()[1:] if n is not None)
    if found != (descr, shape):
        raise FormatError(f"{name}: holds {found[0]} {list(found[1])}, must hold {descr} {list(shape)}")
    n_bytes = math.prod(shape) * np.dtype(descr).itemsize
    if len(data) - start != n_bytes:
        raise FormatError(f"{name}: {len(data) - start} bytes after the header, its shape implies {n_bytes}")
    return np.frombuffer(data, descr, offset=start).reshape(shape) if n_bytes else np.zeros(shape, descr)
