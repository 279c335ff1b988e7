"""Names of files that may be patterns: for texts that come as many files."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from krafla_cli.errors import InputError
from krafla_cli.formats.text import printable


def expand(patterns: Sequence[str]) -> list[Path]:
    """The files that ``patterns`` (names, or globs; ``**`` crosses folders) mean: pattern by pattern, each sorted.

    A file is taken once, where it is first named. Raises InputError for a glob that matches no file.
    """
    return list(dict.fromkeys(chain.from_iterable(_matches(pattern) for pattern in patterns)))


def _matches(pattern: str) -> list[Path]:
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [Path(pattern)]
    names = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - a pattern may be absolute
    found = [path for path in map(Path, names) if path.is_file()]
    if not found:
        raise InputError(f"no file matches {printable(pattern)!r}")
    return found
