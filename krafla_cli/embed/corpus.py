"""A corpus of many files, cut into shards of texts that can be read by themselves, in any order and on any machine.

Files are lines, JSON lines or Parquet. A scan reads each once, before the work: it counts the texts, notes where every
shard begins, and hashes the file, so that a job that is started again knows whether it still has the same texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from krafla_cli.embed.texts import (
    DEFAULT_FIELD,
    count_lines,
    field_of,
    line_content,
    open_texts,
    read_texts,
    text_of_line,
)
from krafla_cli.errors import FileError, FormatError, InputError, os_reason
from krafla_cli.formats.sidecar import file_sha256
from krafla_cli.formats.text import printable

PARQUET_SUFFIXES = (".parquet", ".pq")
MAX_LINE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20


def is_parquet(path: Path) -> bool:
    """Whether the name of ``path`` is that of a Parquet file."""
    return path.suffix in PARQUET_SUFFIXES


@dataclass(frozen=True)
class Source:
    """One scanned file: ``name`` as the user wrote it, ``path`` absolute.

    ``stamp``: size in bytes and time of change in nanoseconds. ``starts``: byte offset of each stretch's first line
    (none for Parquet). ``fault``: why nothing in it can be read; it counts as a file without texts then.
    """

    path: Path
    name: str
    field: str | None
    stamp: tuple[int, int]
    sha256: str
    n_texts: int
    starts: tuple[int, ...] = ()
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """``n_texts`` consecutive texts of a file, from number ``first`` (from 0) at byte ``start`` on.

    ``stamp``: size and time of change that the file had when it was scanned.
    """

    path: Path
    name: str
    field: str | None
    stamp: tuple[int, int]
    first: int
    n_texts: int
    start: int


@dataclass(frozen=True)
class Unreadable:
    """``n_texts`` texts that cannot be read, and why."""

    message: str
    n_texts: int = 1


def scan(path: Path, name: str, json_field: str | None, texts_per_stretch: int) -> Source:
    """Looks through a whole file, called ``name`` in messages.

    Raises FileError: it cannot be opened or read, or is no regular file.
    """
    shown = printable(name)
    try:
        stamp = _stamp(path)
        if not path.is_file():
            raise FileError(f"{shown} is no regular file; a corpus is read more than once")
        if is_parquet(path):
            return _scan_parquet(path, name, json_field or DEFAULT_FIELD, stamp)
        chosen = field_of(path, json_field)
        with open_texts(path) as file:
            sha256, n_texts, starts = _scan_lines(file, chosen is not None, texts_per_stretch)
    except OSError as error:
        raise FileError(f"cannot read {shown}: {os_reason(error)}") from error
    return Source(path, name, chosen, stamp, sha256, n_texts, starts)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _scan_parquet(path: Path, name: str, column: str, stamp: tuple[int, int]) -> Source:
    from krafla_cli.embed import parquet

    count, fault = 0, None
    try:
        count = parquet.n_rows(path, column, printable(name))
    except FormatError as error:
        fault = str(error)
    return Source(path, name, column, stamp, file_sha256(path), count, fault=fault)


def _scan_lines(file: BinaryIO, drop_blank_end: bool, step: int) -> tuple[str, int, tuple[int, ...]]:
    """SHA-256, number of lines, and where each ``step``-th line begins.

    ``drop_blank_end``: lines with nothing but white space at the end of the file do not count.
    """
    digest = hashlib.sha256()
    starts, offset, n_ends, n_lines = [0], 0, 0, 0
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
        position = 0
        while position := block.find(b"\n", position) + 1:
            n_ends += 1
            if n_ends % step == 0:
                starts.append(offset + position)
        if content := len(block.rstrip()) if drop_blank_end else len(block):
            is_open = block[content - 1 : content] != b"\n"
            n_lines = n_ends - block.count(b"\n", content) + is_open
        offset += len(block)
    return digest.hexdigest(), n_lines, tuple(starts[: -(-n_lines // step)])


def stretches(source: Source, step: int) -> Iterator[Stretch]:
    """The stretches of ``step`` texts (the last one shorter) of a file that was scanned with that step."""
    for i, first in enumerate(range(0, source.n_texts, step)):
        start = source.starts[i] if source.starts else 0
        n_texts = min(step, source.n_texts - first)
        yield Stretch(source.path, source.name, source.field, source.stamp, first, n_texts, start)


def read_stretch(stretch: Stretch) -> Iterator[tuple[int, str | Unreadable]]:
    """The texts of a stretch with their numbers in the file (from 0), or what is wrong with each.

    Raises FileError: the file cannot be opened or read, or is not what was scanned.
    """
    path = stretch.path
    name = printable(stretch.name)
    try:
        if _stamp(path) != stretch.stamp:
            raise FileError(f"{name} was changed while the command ran; run it again")
        yield from (_parquet_texts if is_parquet(path) else _line_texts)(stretch, name)
    except OSError as error:
        raise FileError(f"cannot read {name}: {os_reason(error)}") from error


def _line_texts(stretch: Stretch, name: str) -> Iterator[tuple[int, str | Unreadable]]:
    with open_texts(stretch.path) as file:
        file.seek(stretch.start)
        for number in range(stretch.first, stretch.first + stretch.n_texts):
            where = f"{name}: line {number + 1}"
            line = file.readline(MAX_LINE_BYTES)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                _skip_line(file)
                yield number, Unreadable(f"{where}: longer than {MAX_LINE_BYTES} bytes")
                continue
            try:
                yield number, text_of_line(line_content(line, number == 0), stretch.field, where)
            except (FormatError, InputError) as error:
                yield number, Unreadable(str(error))


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(_BLOCK_BYTES)) and not part.endswith(b"\n"):
        pass


def _parquet_texts(stretch: Stretch, name: str) -> Iterator[tuple[int, str | Unreadable]]:
    from krafla_cli.embed import parquet

    number, end = stretch.first, stretch.first + stretch.n_texts
    try:
        for text in parquet.row_texts(stretch.path, stretch.field or "", number, stretch.n_texts, name):
            yield number, text if isinstance(text, str) else Unreadable(str(text))
            number += 1
    except FormatError as error:
        yield number, Unreadable(str(error), end - number)


def count_texts(paths: Iterable[Path], json_field: str | None) -> int:
    """About how many texts :func:`texts_of` gives: line feeds, rows of Parquet; 0 for what can be read only once.

    Raises FileError, FormatError: a Parquet file cannot be read.
    """
    return sum(
        _count_rows(path, json_field or DEFAULT_FIELD) if is_parquet(path) else count_lines(path) for path in paths
    )


def _count_rows(path: Path, column: str) -> int:
    from krafla_cli.embed import parquet

    return parquet.n_rows(path, column, printable(str(path)))


def texts_of(paths: Iterable[Path], json_field: str | None) -> Generator[str]:
    """All texts of regular files one after the other; the first that cannot be read ends it.

    Raises FileError, FormatError, InputError.
    """
    for path in paths:
        if is_parquet(path):
            yield from _strict_rows(path, json_field or DEFAULT_FIELD)
        else:
            with open_texts(path) as file:
                name = "standard input" if str(path) == "-" else str(path)
                yield from read_texts(file, name, field_of(path, json_field))


def _strict_rows(path: Path, column: str) -> Iterator[str]:
    from krafla_cli.embed import parquet

    for text in parquet.row_texts(path, column, 0, _count_rows(path, column), printable(str(path))):
        if not isinstance(text, str):
            raise text
        yield text
