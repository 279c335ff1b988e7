"""Plain-text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from krafla_cli.formats.text import printable


def cell(value: Any) -> str:
    """A value as the text of a table cell, safe to print."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return " x ".join(str(v) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else printable(str(value))


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a table with a heading; numbers to the right, the rest to the left."""
    texts = [[cell(v) for v in row] for row in rows]
    widths = [max([len(c), *(len(row[i]) for row in texts)]) for i, c in enumerate(columns)]
    right = [
        bool(rows) and all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)
        for i in range(len(columns))
    ]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)).rstrip()

    return [line(columns), line(["-" * w for w in widths]), *(line(row) for row in texts)]


def pairs(values: dict[str, Any]) -> list[str]:
    """Lines "name   value", names to one width."""
    width = max((len(k) for k in values), default=0)
    return [f"{printable(k).ljust(width)}  {cell(v)}" for k, v in values.items()]
