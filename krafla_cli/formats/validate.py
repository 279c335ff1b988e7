"""Validating files and folders of every known format, with what lies beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from krafla_cli.errors import FileError, FormatError
from krafla_cli.formats import detect, index_folder
from krafla_cli.formats.faults import FORMAT, IO, Report
from krafla_cli.formats.sidecar import file_sha256, read_sidecar, sidecar_path

SUFFIXES = frozenset({".mlb", ".mlt", ".mli", ".bin", ".mllm", ".gguf"})


def validate(path: str | os.PathLike[str]) -> Report:
    """The report of one file, or of an index's folder; of a model, also whether its sidecar's SHA-256 is the model's.

    >>> krafla_cli.validate("demo.mlb").valid
    True
    """
    if index_folder.is_index(path):
        return index_folder.validate(path)
    report = detect.validate(path)
    if report.kind == "mlb" and report.valid and sidecar_path(path).is_file():
        _check_sidecar(Path(path), report)
    return report


def _check_sidecar(model: Path, report: Report) -> None:
    name = sidecar_path(model)
    try:
        stated, actual = read_sidecar(name).sha256, file_sha256(model)
    except FileError as error:
        report.fault(IO, "sidecar", None, str(error))
    except FormatError as error:
        report.fault(FORMAT, "sidecar", None, str(error))
    else:
        if stated != actual:
            report.fault(
                FORMAT, "sidecar", None, f"SHA-256 in {name.name} is {stated[:16]}…, the model's is {actual[:16]}…"
            )


def expand(paths: tuple[Path, ...]) -> Iterator[Path]:
    """What to check: each path, and for a folder every file below it named like a known format, and every index."""
    for path in paths:
        if path.is_dir() and not index_folder.is_index(path):
            yield from sorted(p for p in path.rglob("*") if _is_known(p))
        else:
            yield path


def _is_known(path: Path) -> bool:
    return index_folder.is_index(path) or (path.suffix in SUFFIXES and path.is_file())
