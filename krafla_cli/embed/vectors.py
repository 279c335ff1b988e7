"""Embeddings as files: .npy (float32 rows) or JSON lines, written as they come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import UsageError
from krafla_cli.formats.npy import npy_header
from krafla_cli.formats.text import printable

Float32 = npt.NDArray[np.float32]


def vector_writer(path: Path) -> type[NpyWriter] | type[JsonLinesWriter]:
    """The writer that the name of ``path`` asks for: ``write`` texts and rows in order, then ``finish``.

    Raises UsageError for other names.
    """
    writers: dict[str, type[NpyWriter] | type[JsonLinesWriter]] = {".npy": NpyWriter, ".jsonl": JsonLinesWriter}
    if path.suffix not in writers:
        raise UsageError(
            f"{printable(str(path))}: embeddings are written as .npy or .jsonl; "
            "as Parquet shards, with -f FILE, into a folder that is there or whose name has no dot"
        )
    return writers[path.suffix]


class NpyWriter:
    """A float32 array [rows, dims] in NumPy's format 1.0; the number of rows is filled in at the end."""

    def __init__(self, file: BinaryIO, dims: int) -> None:
        self.file = file
        self.dims = dims
        self.n_rows = 0
        file.write(self._header())

    def write(self, texts: Sequence[str], rows: Float32) -> None:
        self.file.write(np.ascontiguousarray(rows, "<f4").data)
        self.n_rows += len(rows)

    def finish(self) -> None:
        self.file.seek(0)
        self.file.write(self._header())

    def _header(self) -> bytes:
        return npy_header("<f4", (self.n_rows, self.dims))


class JsonLinesWriter:
    """A line {"text": ..., "embedding": [...]} for each text."""

    def __init__(self, file: BinaryIO, dims: int) -> None:
        self.file = file

    def write(self, texts: Sequence[str], rows: Float32) -> None:
        for document in documents(texts, rows):
            self.file.write(json.dumps(document).encode("ascii") + b"\n")

    def finish(self) -> None:
        """Nothing is left to do."""


def documents(texts: Sequence[str], rows: Float32) -> list[dict[str, Any]]:
    """A JSON-ready object for each text; numbers have the fewest digits that identify the float32."""
    return [{"text": text, "embedding": _shortest(row)} for text, row in zip(texts, rows, strict=True)]


def _shortest(row: Float32) -> list[float]:
    return [float(str(value)) for value in row]
