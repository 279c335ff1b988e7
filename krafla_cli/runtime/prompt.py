"""Reading prompts: text from files, a pipe or standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from krafla_cli.errors import FileError, InputError, os_reason
from krafla_cli.formats.text import printable
from krafla_cli.globs import expand


def read_text(path: Path) -> str:
    """The whole text of a file, a pipe, or for "-" of standard input, exactly (line ends and all).

    Raises FileError (cannot be read), InputError (no UTF-8, naming the byte).
    """
    name = "standard input" if str(path) == "-" else printable(str(path))
    try:
        if str(path) == "-" and sys.stdin is None:
            raise FileError("cannot read standard input: it is closed")
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise FileError(f"cannot read {name}: {os_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}") from error


def read_texts(patterns: Sequence[Path]) -> str:
    """The texts of all files that ``patterns`` (names, or globs) mean, one after the other with nothing between them.

    Raises as :func:`read_text`, and InputError for a glob that matches no file.
    """
    return "".join(read_text(path) for path in expand([str(pattern) for pattern in patterns]))
