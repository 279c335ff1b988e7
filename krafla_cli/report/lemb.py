"""``mlb inspect`` of a LEMB embedding model: what it is, its header, sections, metadata, tensors."""

from __future__ import annotations

import json
import os
from typing import Any

from krafla_cli.formats.lemb import LembModel, read
from krafla_cli.formats.lemb import describe as describe_file
from krafla_cli.formats.lemb_layout import EMBEDDING_QUANTS, LAYOUT, WEIGHT_QUANTS, tensors
from krafla_cli.report.inspect import Document, header_rows


def describe(path: str | os.PathLike[str], _ctx: int | None, with_tensors: bool) -> Document:
    """The document of an embedding model; ``with_tensors`` adds a row for each array."""
    model, told = read(path), describe_file(path)
    n_bytes = told["n_bytes"]
    tables: dict[str, Any] = {
        "sections": [{**section, "share": f"{section['length'] / n_bytes:.1%}"} for section in told["sections"]],
        "metadata": [{"key": key, "value": _shown(value)} for key, value in (told["metadata"] or {}).items()],
    }
    if with_tensors:
        tables["tensors"] = tensor_rows(model, {s["type"]: s["offset"] for s in told["sections"]})
    return {
        "summary": summary(model, told["sha256"]),
        "header": header_rows(LAYOUT, {**model.header.values, "model_id": model.header.name}, _meaning),
        "tables": tables,
    }


def summary(model: LembModel, sha256: str) -> dict[str, Any]:
    """The model in a few lines."""
    header, config = model.header, model.tokenizer
    body = f"{header.n_layers} layers, {header.weight_encoding} weights" if header.n_layers else "static"
    special = {"unk": config.unk_token_id, "cls": config.cls_token_id, "sep": config.sep_token_id}
    return {
        "model": f"{header.name} {header.version}",
        "kind": f"{body}, {header.embedding_encoding} embedding table",
        "widths": ", ".join(map(str, header.dims)),
        "tokenizer": f"{'lower-cased' if header.lower_case else 'cased'}, accents "
        f"{'stripped' if header.strip_accents else 'kept'}, "
        + ", ".join(f"{name} {token_id}" for name, token_id in special.items()),
        "license": f"{header.license_id or 'none'}, {'with' if header.has_fingerprint else 'no'} fingerprint",
        "SHA-256": sha256,
    }


def tensor_rows(model: LembModel, offsets: dict[int, int]) -> list[dict[str, Any]]:
    """A row for each array: shape, encoding, place in the file."""
    return [
        {
            "name": spec.name,
            "shape": " x ".join(map(str, spec.shape)) or "1",
            "encoding": spec.encoding,
            "offset": offsets[spec.section] + spec.offset,
            "bytes": spec.n_bytes,
        }
        for spec in tensors(model.header)
    ]


def _meaning(name: str, value: Any) -> str:
    if name == "flags":
        bits = {1: "fingerprint", 2: "lower-case", 4: "strip accents"}
        return ", ".join(text for bit, text in bits.items() if value & bit)
    names = {"embedding_quant": EMBEDDING_QUANTS, "weight_quant": WEIGHT_QUANTS}.get(name, ())
    return names[value] if names and value < len(names) else ""


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)
