"""JSON documents with one value of another kind, for every value that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KINDS = (None, True, -1, 0, 2.5, 10**30, 10**400, 1e308, "", "x\x1b", [], [1], [[]], {}, {"a": [1]})


def variants(document: Any) -> Iterator[Any]:
    """``document`` once for each of its values and each of KINDS in its place, and once without each of its keys."""
    yield from KINDS
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in list(items):
        for other in variants(value):
            changed = document.copy()
            changed[key] = other
            yield changed
        if isinstance(document, dict):
            yield {k: v for k, v in document.items() if k != key}
