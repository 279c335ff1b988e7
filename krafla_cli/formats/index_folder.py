"""Folders that hold a search index: a matrix of embeddings, the texts, and a manifest that says what made them.

    manifest.json   what the index was built with; see Manifest
    vectors.npy     [count, dims] float32 rows of length 1, or int8 codes
    scales.npy      [count] float32, with int8 codes only: a row is its codes times its scale
    texts.jsonl     a line {"text": ...} for each row
    offsets.npy     [count + 1] int64: line i is the bytes offsets[i] to offsets[i + 1] of texts.jsonl

Source: the LEMB specification, section 8, for what the manifest is for; the rest is this tool's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import FileError, FormatError, MlbError
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.faults import FORMAT, IO, Report
from krafla_cli.formats.json_file import parse_json, read_json_object
from krafla_cli.formats.npy import map_npy
from krafla_cli.formats.text import printable

INDEX_VERSION = 1
MANIFEST, VECTORS, SCALES = "manifest.json", "vectors.npy", "scales.npy"
TEXTS, OFFSETS = "texts.jsonl", "offsets.npy"
FILES = (MANIFEST, VECTORS, SCALES, TEXTS, OFFSETS)
DTYPES = {"float32": "<f4", "int8": "|i1"}

_MAX_MANIFEST_BYTES = 1 << 20
_MAX_ROWS = 1 << 40
_VERSION = re.compile(r"(\d{1,3})\.(\d{1,3})\.(\d{1,5})")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """What an index was built with, and what it holds. ``model`` is the model's path, relative to the index."""

    index_version: int
    model_id: str
    model_version: str
    dims: int
    license_id: int
    has_fingerprint: bool
    model_sha256: str  # what the model file ends with
    model: str
    dtype: str
    count: int

    @property
    def version(self) -> tuple[int, int, int]:
        """major, minor, patch of the model."""
        match = _VERSION.fullmatch(self.model_version)
        return (int(match[1]), int(match[2]), int(match[3])) if match else (0, 0, 0)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=2).encode("ascii") + b"\n"


def _is_int(low: int, high: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def _is_text(v: Any) -> bool:
    return isinstance(v, str)


# Field, rule, and the rule in words. index_version comes first: what follows has a meaning only for a known one.
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("index_version", lambda v: _is_int(1, INDEX_VERSION)(v), f"this tool reads {INDEX_VERSION}"),
    ("model_id", lambda v: _is_text(v) and len(v.encode("utf-8", "replace")) <= 16, "must be at most 16 bytes of text"),
    ("model_version", lambda v: _is_text(v) and bool(_VERSION.fullmatch(v)), 'must be like "1.2.0"'),
    ("dims", _is_int(1, 65535), "must be 1 to 65535"),
    ("license_id", _is_int(0, 2**32 - 1), "must be 0 to 4294967295"),
    ("has_fingerprint", lambda v: isinstance(v, bool), "must be true or false"),
    ("model_sha256", lambda v: _is_text(v) and bool(_SHA256.fullmatch(v)), "must be 64 hexadecimal digits"),
    ("model", _is_text, "must be a path"),
    ("dtype", lambda v: _is_text(v) and v in DTYPES, "must be float32 or int8"),
    ("count", _is_int(1, _MAX_ROWS), "must be at least 1"),
)


def _faults(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Field and message of every broken rule; only the version's where that is not known."""
    for name, holds, rule in _RULES:
        if name not in document:
            yield name, "is missing"
        elif not holds(document[name]):
            shown = printable(json.dumps(document[name]), 60)
            yield name, f"is {shown}, {rule}"
        else:
            continue
        if name == "index_version":
            return


def parse_manifest(document: Mapping[str, Any], name: str) -> Manifest:
    """The manifest in a JSON object; fields that this version does not know are left alone. Raises FormatError."""
    for field, message in _faults(document):
        raise FormatError(f"{printable(name)}: {field} {message}")
    return Manifest(**{name: document[name] for name, _, _ in _RULES})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the index in ``folder``. Raises FileError, FormatError."""
    path = folder / MANIFEST
    if folder.is_dir() and not path.exists():
        raise FileError(f"{printable(str(folder))}: is no index, it has no {MANIFEST}; `mlb index build` makes one")
    return parse_manifest(read_json_object(path, _MAX_MANIFEST_BYTES), str(path))


@dataclass(frozen=True)
class IndexFolder:
    """An index, mapped: ``vectors`` [count, dims]; ``scales`` [count], empty for float32."""

    path: Path
    manifest: Manifest
    vectors: npt.NDArray[Any]
    scales: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.int64]
    texts: memoryview

    def text(self, row: int) -> str:
        """The text of a row. Raises FormatError where the place or the line is not what it must be."""
        name = f"{printable(str(self.path / TEXTS))}: line {row + 1}"
        start, end = (int(o) for o in self.offsets[row : row + 2])
        if not 0 <= start < end <= len(self.texts):
            raise FormatError(f"{name}: bytes {start} to {end}, the file has {len(self.texts)}")
        line = parse_json(self.texts[start:end], name)
        if not isinstance(line, dict) or not isinstance(line.get("text"), str):
            raise FormatError(f'{name}: must be an object with a "text"')
        return str(line["text"])


def text_line(text: str) -> bytes:
    """A text's line in texts.jsonl."""
    return json.dumps({"text": text}).encode("ascii") + b"\n"


def open_index(path: str | os.PathLike[str]) -> IndexFolder:
    """The index in folder ``path``, its files mapped and their shapes checked. Raises FileError, FormatError."""
    folder = Path(path)
    return _open_files(folder, read_manifest(folder))


def _open_files(folder: Path, manifest: Manifest) -> IndexFolder:
    n = manifest.count
    vectors = map_npy(folder / VECTORS, DTYPES[manifest.dtype], (n, manifest.dims))
    scales = map_npy(folder / SCALES, "<f4", (n,)) if manifest.dtype == "int8" else np.zeros(0, np.float32)
    offsets = map_npy(folder / OFFSETS, "<i8", (n + 1,))
    return IndexFolder(folder, manifest, vectors, scales, offsets, map_file(folder / TEXTS))


def is_index(path: str | os.PathLike[str]) -> bool:
    """Whether a folder claims to be an index."""
    return all((Path(path) / name).is_file() for name in (MANIFEST, VECTORS))


def validate(path: str | os.PathLike[str]) -> Report:
    """Every fault of an index, as far as going on is safe: the manifest's fields, the files' shapes, values, texts."""
    report = Report(str(path), "index")
    folder = Path(path)
    try:
        document = read_json_object(folder / MANIFEST, _MAX_MANIFEST_BYTES)
        for field, message in _faults(document):
            report.fault(FORMAT, f"{MANIFEST}: {field}", None, message)
        if report.valid:
            _check_content(_open_files(folder, parse_manifest(document, MANIFEST)), report)
    except FileError as error:
        report.fault(IO, "file", None, str(error))
    except MlbError as error:
        report.fault(FORMAT, "file", None, str(error))
    return report


def _check_content(index: IndexFolder, report: Report) -> None:
    for name, values in ((VECTORS, index.vectors), (SCALES, index.scales)):
        finite = np.isfinite(values) if values.dtype.kind == "f" else np.ones(1, bool)
        if not finite.all():
            row = int(np.argmin(finite.reshape(len(values), -1).all(axis=1)))
            report.fault(FORMAT, name, None, f"row {row} is not finite")
    ends = (int(index.offsets[0]), int(index.offsets[-1]))
    if ends != (0, len(index.texts)) or (np.diff(index.offsets) <= 0).any():
        report.fault(FORMAT, OFFSETS, None, f"must ascend from 0 to {len(index.texts)}, the bytes of {TEXTS}")
        return
    for row in range(index.manifest.count):
        index.text(row)
