"""``mlb inspect`` of a GGUF model: architecture, sizes by data type, metadata, tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from krafla_cli.formats.data_types import DataType
from krafla_cli.formats.gguf import HEADER, GgufFile, Value, open_gguf
from krafla_cli.report.inspect import Document, header_rows

_SHOWN_ITEMS = 4
_SHOWN_CHARS = 60


def describe(path: str | os.PathLike[str], _ctx: int | None, with_tensors: bool) -> Document:
    """The document of a model. Raises as :func:`~krafla_cli.formats.gguf.open_gguf`."""
    model = open_gguf(path)
    tables = {
        "bytes by data type": type_rows((t.kind, t.n_weights, t.n_bytes) for t in model.tensors.values()),
        "metadata": [metadata_row(key, value) for key, value in model.metadata.items()],
    }
    if with_tensors:
        tables["tensors"] = [
            {"name": t.name, "shape": list(t.shape), "type": t.kind.name, "offset": t.offset, "bytes": t.n_bytes}
            for t in model.tensors.values()
        ]
    return {"summary": summary(model), "header": header_rows(HEADER, model.header), "tables": tables}


def summary(model: GgufFile) -> dict[str, Any]:
    """The model in a few lines; what its architecture does not state is left out."""
    architecture = model.get("general.architecture", str)
    n_weights = sum(t.n_weights for t in model.tensors.values())
    n_bytes = sum(t.n_bytes for t in model.tensors.values())
    found = {
        "architecture": architecture,
        "name": _plain(model, "general.name"),
        "weights": f"{n_weights:,}",
        "bits per weight": round(8 * n_bytes / n_weights, 3) if n_weights else None,
        "layers": _plain(model, f"{architecture}.block_count"),
        "longest context": _plain(model, f"{architecture}.context_length"),
        "tokenizer": _tokenizer(model),
        "chat template": "yes" if "tokenizer.chat_template" in model.metadata else None,
    }
    return {label: value for label, value in found.items() if value is not None}


def _plain(model: GgufFile, key: str) -> Any:
    entry = model.metadata.get(key)
    return entry.value if entry is not None and isinstance(entry.value, (str, int, float)) else None


def _tokenizer(model: GgufFile) -> str | None:
    kind, pre = _plain(model, "tokenizer.ggml.model"), _plain(model, "tokenizer.ggml.pre")
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if kind is None:
        return None
    n_tokens = f", {len(tokens.value):,} tokens" if tokens is not None and isinstance(tokens.value, list) else ""
    return f"{kind}{f' ({pre})' if pre is not None else ''}{n_tokens}"


def type_rows(tensors: Iterable[tuple[DataType, int | None, int]]) -> list[dict[str, Any]]:
    """A row for each data type; ``tensors``: type, number of weights (None where unknown), bytes."""
    rows: dict[str, dict[str, Any]] = {}
    total = 0
    for kind, n_weights, n_bytes in tensors:
        row = rows.setdefault(kind.name, {"type": kind.name, "tensors": 0, "weights": 0, "bytes": 0, "share %": 0.0})
        row["tensors"] += 1
        row["weights"] = None if n_weights is None else row["weights"] + n_weights
        row["bytes"] += n_bytes
        total += n_bytes
    for row in rows.values():
        row["share %"] = round(100 * row["bytes"] / total, 2) if total else 0.0
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def metadata_row(key: str, entry: Value) -> dict[str, Any]:
    """The row of one metadata pair; long texts and arrays are shown by their beginning."""
    return {"key": key, "type": entry.type_name, "value": _shown(entry.value)}


def _shown(value: Any) -> Any:
    if isinstance(value, (list, np.ndarray)):
        items = [_shown(v) for v in list(value[:_SHOWN_ITEMS])]
        more = f", … {len(value):,} in all" if len(value) > _SHOWN_ITEMS else ""
        return f"[{', '.join(repr(i) if isinstance(i, str) else str(i) for i in items)}{more}]"
    if isinstance(value, str) and len(value) > _SHOWN_CHARS:
        return f"{value[:_SHOWN_CHARS]}… {len(value):,} characters"
    return value
