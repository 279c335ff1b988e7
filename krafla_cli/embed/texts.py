"""Texts from files and pipes: a text on each line, or a JSON object on each line with the text in one of its fields."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from krafla_cli.errors import FileError, FormatError, InputError, os_reason
from krafla_cli.formats.json_file import parse_json, shown_json
from krafla_cli.formats.text import printable

JSONL_SUFFIXES = (".jsonl", ".ndjson")
DEFAULT_FIELD = "text"


def open_texts(path: Path) -> BinaryIO:
    """``path`` (a file, a pipe, or "-" for stdin) for :func:`read_texts`. Raises FileError."""
    if str(path) == "-":
        return sys.stdin.buffer
    try:
        return path.open("rb")
    except OSError as error:
        raise FileError(f"cannot open {printable(str(path))}: {os_reason(error)}") from error


def field_of(path: Path, field: str | None) -> str | None:
    """The JSON field to read: as asked for, "text" for files named as JSON lines, None for plain lines."""
    return DEFAULT_FIELD if field is None and path.suffix in JSONL_SUFFIXES else field


def read_texts(file: BinaryIO, name: str, field: str | None = None) -> Iterator[str]:
    """The texts of ``file``, one a line; with ``field``, that field of each line's JSON object.

    Only line feeds end a line (with a carriage return before it dropped). An empty line is an empty text; in JSON
    lines it is an error, unless only empty lines follow. ``name`` is for errors. Raises FileError, FormatError.
    """
    name = printable(name)
    empty_line = 0
    for number, line in enumerate(_lines(file, name), 1):
        where = f"{name}: line {number}"
        if field is not None and not line.strip():
            empty_line = empty_line or number
        elif empty_line:
            raise FormatError(f"{name}: line {empty_line} is empty, JSON lines have an object on each")
        else:
            yield text_of_line(line, field, where)


def text_of_line(line: bytes, field: str | None, where: str) -> str:
    """The text of one line without its end: the line itself, or with ``field`` that field of its JSON object.

    ``where`` is for errors. Raises FormatError (not UTF-8, not such a JSON object), InputError (half a surrogate pair).
    """
    return decoded(line, where) if field is None else _field_text(parse_json(line, where), field, where)


def count_lines(path: Path) -> int:
    """Line feeds in a regular file; 0 for anything that can be read only once."""
    if not path.is_file():
        return 0
    with path.open("rb") as f:
        return sum(block.count(b"\n") for block in iter(lambda: f.read(1 << 20), b""))


def chunks(texts: Iterator[str], n: int) -> Iterator[list[str]]:
    """``texts`` in lists of ``n``."""
    while chunk := list(islice(texts, n)):
        yield chunk


def check_unicode(text: str, where: str) -> str:
    """``text``; raises InputError if it holds half of a surrogate pair, which is no character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: {printable(text[error.start])} at character {error.start} is no character"
        ) from error
    return text


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        for number, line in enumerate(file):
            yield line_content(line, is_first=number == 0)
    except OSError as error:
        raise FileError(f"cannot read {name}: {os_reason(error)}") from error


def line_content(line: bytes, is_first: bool) -> bytes:
    """``line`` without its end; without the byte order mark as well where it is a file's first."""
    text = line.removesuffix(b"\n").removesuffix(b"\r")
    return text.removeprefix(b"\xef\xbb\xbf") if is_first else text


def decoded(line: bytes, where: str) -> str:
    """``line`` as text. Raises FormatError: not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8 at byte {error.start}") from error


def _field_text(document: Any, field: str, where: str) -> str:
    if not isinstance(document, dict):
        raise FormatError(f"{where}: must be a JSON object, is {shown_json(document)}")
    if field not in document:
        keys = ", ".join(printable(k, 40) for k in list(document)[:8])
        raise FormatError(f"{where}: has no field {printable(field, 40)!r} (it has: {keys}); --field names another")
    text = document[field]
    if not isinstance(text, str):
        raise FormatError(f"{where}: field {printable(field, 40)!r} must be text, is {shown_json(text)}")
    return check_unicode(text, where)
