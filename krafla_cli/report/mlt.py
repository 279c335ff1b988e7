"""``mlb inspect`` of a .mlt tokenizer: kind, flags in words, header, and with --tensors every token and merge."""

from __future__ import annotations

import os
from typing import Any

from krafla_cli.formats.mlt import ATTR_ADDED, LAYOUT, Flag, Kind, Mlt, read
from krafla_cli.formats.text import printable_bytes
from krafla_cli.report.inspect import Document, header_rows
from krafla_cli.tokenizer.inspect import summary

_ATTRIBUTES = {0: "piece", ATTR_ADDED: "added", 2: "byte"}


def describe(path: str | os.PathLike[str], _ctx: int | None, with_tensors: bool) -> Document:
    """The document of a tokenizer; ``with_tensors`` lists its tokens and merges."""
    mlt = read(path)
    told = summary(mlt)
    values = {
        "magic": b"MLT1",
        "version": 1,
        "kind": int(mlt.kind),
        "n_vocab": len(mlt.tokens),
        "n_merges": len(mlt.merges),
        "bos": mlt.bos,
        "eos": mlt.eos,
        "flags": int(mlt.flags),
    }
    return {
        "summary": {
            "kind": told["kind"],
            "flags": ", ".join(told["flag_names"]) or "none",
            "tokens": f"{told['n_vocab']:,}: {told['n_added']} added, {told['n_holes']} holes",
            "merges": f"{told['n_merges']:,}",
            "bos": _token_in_words(mlt, mlt.bos),
            "eos": _token_in_words(mlt, mlt.eos),
        },
        "header": header_rows(LAYOUT, values, _meaning),
        "tables": {"tokens": _token_rows(mlt), "merges": _merge_rows(mlt)} if with_tensors else {},
    }


def _token_in_words(mlt: Mlt, token_id: int) -> str:
    return "none" if token_id < 0 else f'{token_id} "{printable_bytes(mlt.tokens[token_id].data)}"'


def _meaning(name: str, value: Any) -> str:
    if name == "kind":
        return Kind(value).name.lower()
    if name == "flags":
        return " + ".join(f.name.lower() for f in Flag if f in Flag(value) and f.name)
    return ""


def _token_rows(mlt: Mlt) -> list[dict[str, Any]]:
    return [
        {"id": i, "kind": _ATTRIBUTES[t.attr], "bytes": len(t.data), "text": printable_bytes(t.data)}
        for i, t in enumerate(mlt.tokens)
    ]


def _merge_rows(mlt: Mlt) -> list[dict[str, Any]]:
    names = [printable_bytes(t.data) for t in mlt.tokens]
    return [
        {"rank": rank, "left": names[left], "right": names[right], "merged": names[merged], "id": int(merged)}
        for rank, (left, right, merged) in enumerate(mlt.merges)
    ]
