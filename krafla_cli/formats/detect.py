"""Telling files apart by their first bytes, and handing them to the format that knows them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from krafla_cli.errors import FileError, FormatError
from krafla_cli.formats.cursor import open_regular
from krafla_cli.formats.faults import FORMAT, IO, Fault, Report
from krafla_cli.formats.text import printable, printable_bytes


@dataclass(frozen=True)
class Format:
    """A format: its magic, its name for people, and the module with ``validate(path) -> Report``."""

    kind: str
    magic: bytes
    title: str
    module: str

    def validate(self, path: str | os.PathLike[str]) -> Report:
        """All faults of the file. Raises FileError when it cannot be opened."""
        module = importlib.import_module(f"krafla_cli.formats.{self.module}")
        return cast(Callable[[str | os.PathLike[str]], Report], module.validate)(path)


FORMATS = (
    Format("mlb", b"MLB1", ".mlb model", "mlb_file"),
    Format("mlt", b"MLT1", ".mlt tokenizer", "mlt"),
    Format("mli", b"MLI1", "MLI1 importance matrix", "mli"),
    Format("gguf", b"GGUF", "GGUF model", "gguf"),
    Format("mllm", b"\x9a\x51\x00\x00", "MLLM model", "mllm"),
    Format("mllm", b"\x2c\x4e\x00\x00", "MLLM model, version 1", "mllm"),
    Format("lemb", b"LEMB", "LEMB embedding model", "lemb"),
)


def format_of(start: bytes) -> Format | None:
    """The format whose magic ``start``, the first 8 bytes of a file, begins with; None where there is none."""
    return next((f for f in FORMATS if start.startswith(f.magic)), None)


def detect(path: str | os.PathLike[str]) -> Format:
    """The format of a file by its magic. Raises FileError (cannot be opened), FormatError (no known magic)."""
    with open_regular(path) as f:
        start = f.read(8)
    found = format_of(start)
    if found is None:
        known = ", ".join(f.title for f in FORMATS)
        what = f'begins with "{printable_bytes(start[:4])}"' if start else "is empty"
        raise FormatError(f"{printable(str(path))}: {what}; known formats: {known}")
    return found


# What to do with a file of one kind where another is needed: (needed, given).
_ADVICE = {
    ("mlb", "gguf"): "`mlb convert` makes a .mlb of it",
    ("mlb", "mllm"): "`mlb convert` makes a .mlb of it",
    ("mlb", "lemb"): "`mlb embed` uses it",
    ("mlb", "mlt"): "give the .mlb that it belongs to",
    ("lemb", "mlb"): "`mlb run` uses it",
    ("lemb", "gguf"): "`mlb convert` makes a .mlb of it, for `mlb run`",
}


def check_kind(path: str | os.PathLike[str], data: memoryview, kind: str) -> None:
    """Raises FormatError where ``data``, of the file ``path``, is of another known format than ``kind``."""
    found = format_of(bytes(data[:8]))
    if found is not None and found.kind != kind:
        wanted = next(f.title for f in FORMATS if f.kind == kind)
        advice = _ADVICE.get((kind, found.kind))
        end = f"; {advice}" if advice else ""
        raise FormatError(f"{printable(str(path))}: is a {found.title}, not a {wanted}{end}")


def validate(path: str | os.PathLike[str]) -> Report:
    """The report of any file: one that cannot be opened or told is a report with that fault."""
    try:
        return detect(path).validate(path)
    except FileError as error:
        return Report(str(path), "unknown", [Fault(IO, "file", None, str(error))])
    except FormatError as error:
        return Report(str(path), "unknown", [Fault(FORMAT, "file", None, str(error))])
