"""Token ids as they are written on the command line."""

from __future__ import annotations

from krafla_cli.errors import UsageError
from krafla_cli.formats.text import printable


def parse_ids(text: str, option: str) -> list[int]:
    """Token ids from "1,5,7", "1 5 7" or "[1, 5, 7]". Raises UsageError naming ``option`` and quoting what is no id."""
    text = text.strip().removeprefix("[").removesuffix("]")
    if not text.strip():
        return []
    words = [word for piece in text.split(",") for word in (piece.split() or [""])]
    wrong = next((w for w in words if not (w.isascii() and w.isdigit() and len(w) < 10)), None)
    if wrong is not None:
        raise UsageError(f'{option}: "{printable(wrong, 40)}" is no token id; write them as 1,5,7')
    return [int(word) for word in words]
