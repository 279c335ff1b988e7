"""Mapping .npy files from strangers: NumPy's own are read, and nothing is believed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from krafla_cli.errors import FileError, FormatError
from krafla_cli.formats.npy import HEADER_BYTES, map_npy, npy_header

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("array", [VALUES, VALUES.astype(np.int8), np.arange(5), VALUES[:0]])
def test_what_numpy_writes(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    got = map_npy(tmp_path / "a.npy", array.dtype.str, array.shape)
    assert got.dtype == array.dtype
    assert np.array_equal(got, array)


@pytest.mark.parametrize("array", [VALUES, np.arange(5)])
def test_numpy_reads_what_is_written(tmp_path: Path, array: np.ndarray) -> None:
    header = npy_header(array.dtype.str, array.shape)
    assert len(header) == HEADER_BYTES
    (tmp_path / "a.npy").write_bytes(header + array.tobytes())
    assert np.array_equal(np.load(tmp_path / "a.npy"), array)
    assert np.array_equal(map_npy(tmp_path / "a.npy", array.dtype.str, array.shape), array)


GOOD = npy_header("<f4", (2, 3))


def with_text(text: str) -> bytes:
    return GOOD[:10] + text.ljust(117).encode() + b"\n" + VALUES.tobytes()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", 'begins with "", must be a .npy file'),
        (b"\x93NUMPY\x02\x00" + GOOD[8:] + VALUES.tobytes(), "must be a .npy file, version 1.0"),
        (GOOD[:8] + b"\xff\xff" + GOOD[10:] + VALUES.tobytes(), "the header at offset 10 is no array's"),
        (GOOD[:50], "the header at offset 10 is no array's"),
        (GOOD + VALUES.tobytes()[:-1], "23 bytes after the header, its shape implies 24"),
        (GOOD + VALUES.tobytes() + b"x", "25 bytes after the header, its shape implies 24"),
        (npy_header("<f4", (3, 2)) + VALUES.tobytes(), r"holds <f4 \[3, 2\], must hold <f4 \[2, 3\]"),
        (npy_header("<f4", (6,)) + VALUES.tobytes(), r"holds <f4 \[6\], must hold <f4 \[2, 3\]"),
        (npy_header("<i4", (2, 3)) + VALUES.tobytes(), r"holds <i4 \[2, 3\], must hold <f4 \[2, 3\]"),
        (with_text("{'descr': '>f4', 'fortran_order': False, 'shape': (2, 3)}"), "is no array's"),
        (with_text("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}"), "is no array's"),
        (with_text("{'descr': '|O8', 'fortran_order': False, 'shape': (2, 3)}"), "is no array's"),
        (with_text("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 3)}"), "is no array's"),
        (with_text("{'descr': '<f4', 'fortran_order': False, 'shape': (2, -3)}"), "is no array's"),
        (with_text("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999999999, 3)}"), "is no array's"),
        (with_text("((((((((((((((((("), "is no array's"),
    ],
)
def test_hostile_files(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(FormatError, match=words):
        map_npy(tmp_path / "a.npy", "<f4", (2, 3))


def test_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(FileError):
        map_npy(tmp_path, "<f4", (2, 3))
