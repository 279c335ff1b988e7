"""What ``mlb inspect`` shows of a file: one document per format, the same for people and for --json.

A document has ``summary`` (label -> value), ``header`` (rows with name, offset, value, meaning) and ``tables``
(title -> rows), beside the path, the kind and the size.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from krafla_cli.formats import index_folder
from krafla_cli.formats.detect import detect
from krafla_cli.formats.layout import Layout
from krafla_cli.formats.text import human_bytes, printable
from krafla_cli.report.tables import pairs, table

Document = dict[str, Any]

# kind -> module with describe(path, ctx, with_tensors) -> Document
_DESCRIBERS = {kind: f"krafla_cli.report.{kind}" for kind in ("mlb", "mlt", "mli", "gguf", "mllm", "lemb")}


def describe(path: str | os.PathLike[str], ctx: int | None = None, with_tensors: bool = False) -> Document:
    """The document of any known file. ``ctx``: context for which memory is computed (models).

    Raises FileError, FormatError or ShapeError: a file that is not valid is not described.
    """
    if index_folder.is_index(path):
        return describe_index(Path(path))
    kind = detect(path)
    module = importlib.import_module(_DESCRIBERS[kind.kind])
    describe_kind: Callable[[str | os.PathLike[str], int | None, bool], Document] = module.describe
    start = {"path": str(path), "kind": kind.kind, "title": kind.title, "bytes": Path(path).stat().st_size}
    return start | describe_kind(path, ctx, with_tensors)


def describe_index(folder: Path) -> Document:
    """The document of a search index. Raises FileError, FormatError."""
    manifest = index_folder.open_index(folder).manifest
    files = [folder / name for name in index_folder.FILES if (folder / name).is_file()]
    return {
        "path": str(folder),
        "kind": "index",
        "title": "search index",
        "bytes": sum(file.stat().st_size for file in files),
        "summary": vars(manifest),
        "tables": {"files": [{"file": file.name, "bytes": file.stat().st_size} for file in files]},
    }


def header_rows(
    layout: Layout, values: dict[str, Any], meaning: Callable[[str, Any], str] = lambda *_: ""
) -> list[dict[str, Any]]:
    """The header table of a format: a row for each field of its layout, in file order."""
    return [
        {
            "name": f.name,
            "offset": f.offset,
            "value": values[f.name].decode("latin-1") if isinstance(values[f.name], bytes) else values[f.name],
            "note": meaning(f.name, values[f.name]),
            "meaning": f.meaning,
        }
        for f in layout.fields
    ]


def render(document: Document) -> list[str]:
    """The document as lines of text."""
    size = human_bytes(document["bytes"])
    lines = [f"{printable(document['path'])}: {document['title']}, {size} ({document['bytes']:,} bytes)", ""]
    lines += pairs(document.get("summary", {}))
    if document.get("header"):
        columns = ("field", "offset", "value", "", "meaning")
        keys = ("name", "offset", "value", "note", "meaning")
        lines += ["", *table(columns, [[row[k] for k in keys] for row in document["header"]])]
    for title, rows in document.get("tables", {}).items():
        if rows:
            lines += ["", f"{title}:", *table(tuple(rows[0]), [tuple(row.values()) for row in rows])]
    return lines
