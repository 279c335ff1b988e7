"""A converted model against the checkpoint that it came from: the error of each quantized tensor."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from krafla_cli.convert.checkpoint import open_checkpoint
from krafla_cli.convert.plan import Options
from krafla_cli.convert.tensors import errors_against_source
from krafla_cli.errors import ShapeError
from krafla_cli.formats.mlb import WTYPE_Q8_0, Header
from krafla_cli.formats.mlb_file import MlbFile
from krafla_cli.formats.text import printable
from krafla_cli.progress import SILENT, Progress
from krafla_cli.quant.blocks import Quantized

# What a conversion chooses; everything else in a header follows from the checkpoint.
_CHOSEN = ("wtype", "scale_f16", "q8_mask", "max_seq")


def errors_against(model: MlbFile, folder: str | os.PathLike[str], progress: Progress = SILENT) -> dict[str, float]:
    """The relative error of each quantized tensor of ``model`` by name, against the checkpoint in ``folder``.

    Root of the summed squared error over the summed squares. Raises as :func:`krafla_cli.convert.pipeline.convert`
    for the folder; ShapeError where the model cannot have come from it.
    """
    h = model.header
    options = Options(
        "q8" if h.wtype == WTYPE_Q8_0 else "q4", "f16" if h.scale_f16 else "f32", None, h.q8_mask, h.max_seq
    )
    checkpoint = open_checkpoint(Path(folder))
    source, plan = checkpoint.source, checkpoint.plan(options)
    _check_same(model, plan.header, folder)
    quantized = [t for t in plan.tensors if t.spec.is_quantized]
    progress.start("comparing", sum(t.spec.total_bytes for t in quantized), "B")
    errors = {}
    for tensor in quantized:
        matrix = model.quantized(tensor.spec.name)
        errors[tensor.spec.name] = errors_against_source(tensor, source, Quantized(matrix.q, matrix.d)).relative
        source.release(tensor.source)
        progress.advance(tensor.spec.total_bytes)
    progress.finish()
    return errors


def _check_same(model: MlbFile, header: Header, folder: str | os.PathLike[str]) -> None:
    """The model's header must be the one that the checkpoint gives, as far as nobody chooses it."""
    stored = Header.from_bytes(header.to_bytes())
    ours = dataclasses.replace(stored, flags=header.flags)
    for field in dataclasses.fields(Header):
        a, b = getattr(model.header, field.name), getattr(ours, field.name)
        if a != b and field.name not in _CHOSEN:
            raise ShapeError(
                f"{printable(model.path)} did not come from {printable(str(folder))}: {field.name} is {a!r}, "
                f"the checkpoint gives {b!r}"
            )
