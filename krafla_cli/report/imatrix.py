"""``mlb imatrix``: importance matrices added up, and the layers and channels that matter."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from krafla_cli.errors import InputError, ShapeError
from krafla_cli.formats.mli import Imatrix, read, slot_name, slots
from krafla_cli.formats.text import printable


def merged(paths: Sequence[str | os.PathLike[str]]) -> Imatrix:
    """The sum of importance matrices of one model.

    Each channel's sum is the float64 nearest to the exact one, so that the order of the files does not matter.
    Raises FileError or FormatError for a file, ShapeError where the dimensions of two differ.
    """
    _refuse_repeated(paths)
    parts = [read(path) for path in paths]
    first = parts[0]
    for path, part in zip(paths, parts, strict=True):
        if part.dimensions != first.dimensions:
            raise ShapeError(
                f"{printable(str(path))}: made for {part.dimensions}; "
                f"{printable(str(paths[0]))} for {first.dimensions}; only those of one model can be added"
            )
    sums = np.array([math.fsum(column) for column in zip(*(p.sums for p in parts), strict=True)])
    return Imatrix(
        first.dimensions,
        sums,
        sum(p.layer_tokens for p in parts),
        sum(p.classifier_tokens for p in parts),
    )


def _refuse_repeated(paths: Sequence[str | os.PathLike[str]]) -> None:
    """A file that is given twice would count twice. Raises InputError."""
    seen = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise InputError(f"{printable(str(path))} is given twice, and would count twice")
        seen.add(real)


def channel_rows(imatrix: Imatrix, n_top: int) -> list[dict[str, Any]]:
    """A row for each input: how uneven its channels are, and the ``n_top`` that matter most.

    "share of top 1%": part of the summed squares that the largest hundredth of the channels has (0.01 where all are
    alike); channels are shown as "index (times the mean)".
    """
    rows = []
    for layer, slot in slots(imatrix.dimensions):
        sums = imatrix.of(layer, slot)
        total, mean = float(sums.sum()), float(sums.mean())
        order = np.argsort(-sums, kind="stable")
        largest = sums[order[: max(1, len(sums) // 100)]]
        top = [f"{i} ({sums[i] / mean:.1f})" for i in order[:n_top]] if mean > 0 else []
        rows.append(
            {
                "input": slot_name(layer, slot),
                "tokens": imatrix.tokens_of(layer),
                "mean square": mean / max(imatrix.tokens_of(layer), 1),
                "share of top 1%": float(largest.sum()) / total if total > 0 else 0.0,
                "channels (times the mean)": ", ".join(top),
            }
        )
    return rows
