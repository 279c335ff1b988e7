"""``mlb inspect`` of an MLI1 importance matrix: dimensions, tokens, and the spread of each input's channels."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.mli import LAYOUT, Imatrix, read, slot_name, slots
from krafla_cli.report.inspect import Document, header_rows


def describe(path: str | os.PathLike[str], _ctx: int | None, with_tensors: bool) -> Document:
    """The document of an importance matrix; ``with_tensors`` adds a row for each input of each layer."""
    imatrix = read(path)
    tables = {"inputs": slot_rows(imatrix)} if with_tensors else {}
    return {
        "summary": summary(imatrix),
        "header": header_rows(LAYOUT, LAYOUT.unpack(map_file(path))),
        "tables": tables,
    }


def summary(imatrix: Imatrix) -> dict[str, Any]:
    """The matrix in a few lines."""
    silent = [slot_name(*place) for place in slots(imatrix.dimensions) if not imatrix.of(*place).any()]
    shown = ", ".join(silent[:4]) + (f" and {len(silent) - 4} more" if len(silent) > 4 else "")
    return {
        "model": str(imatrix.dimensions),
        "tokens": f"{imatrix.layer_tokens:,} in the layers, {imatrix.classifier_tokens:,} in the classifier",
        "inputs without sums": shown or "none",
    }


def slot_rows(imatrix: Imatrix) -> list[dict[str, Any]]:
    """A row for each input: its mean square, and how far its largest channel stands out."""
    rows = []
    for layer, slot in slots(imatrix.dimensions):
        sums = imatrix.of(layer, slot)
        mean = float(np.mean(sums)) / max(imatrix.tokens_of(layer), 1)
        top = int(np.argmax(sums))
        rows.append(
            {
                "input": slot_name(layer, slot),
                "channels": len(sums),
                "mean square": mean,
                "largest channel": top,
                "times the mean": float(sums[top]) / float(np.mean(sums)) if sums.any() else 0.0,
            }
        )
    return rows
