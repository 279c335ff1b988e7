"""``mlb inspect`` of an MLLM model file: version, sizes by data type, tensors."""

from __future__ import annotations

import os
from typing import Any

from krafla_cli.formats.mllm import MllmFile, open_mllm
from krafla_cli.report.gguf import type_rows
from krafla_cli.report.inspect import Document, header_rows


def describe(path: str | os.PathLike[str], _ctx: int | None, with_tensors: bool) -> Document:
    """The document of a model file. Raises as :func:`~krafla_cli.formats.mllm.open_mllm`."""
    model = open_mllm(path)
    tables = {"bytes by data type": type_rows((t.kind, t.n_weights, t.n_bytes) for t in model.tensors.values())}
    if with_tensors:
        tables["tensors"] = [
            {
                "name": t.name,
                "shape": None if t.shape is None else list(t.shape),
                "type": t.kind.name,
                "offset": t.offset,
                "bytes": t.n_bytes,
            }
            for t in model.tensors.values()
        ]
    values = model.header | ({"name": model.name} if model.version == 2 else {})
    return {"summary": summary(model), "header": header_rows(model.layout, values), "tables": tables}


def summary(model: MllmFile) -> dict[str, Any]:
    """The file in a few lines."""
    known = [t.n_weights for t in model.tensors.values() if t.n_weights is not None]
    return {
        "version": model.version,
        **({"name": model.name} if model.name else {}),
        "tensors": len(model.tensors),
        "weights": f"{sum(known):,}",
        "shapes": "in the file" if model.version == 2 else "not in the file (version 1): they follow from the config",
    }
