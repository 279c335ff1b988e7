"""A checkpoint's weights in the layout of the .mlb but not quantized: what a conversion is compared with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.checkpoint import open_checkpoint
from krafla_cli.convert.plan import Options
from krafla_cli.convert.tensors import check_tied_head, load
from krafla_cli.formats.mlb import Header, TensorSpec
from krafla_cli.quant.blocks import widen


def open_dense(
    src: str | os.PathLike[str],
) -> tuple[Header, Callable[[TensorSpec], npt.NDArray[np.float32]]]:
    """The header of ``src``, a Hugging Face folder or a GGUF file, and a function that loads a tensor of it in float32.

    Raises as :func:`~krafla_cli.convert.pipeline.convert`.
    """
    checkpoint = open_checkpoint(Path(src))
    source, plan = checkpoint.source, checkpoint.plan(Options(wtype="q8"))
    check_tied_head(plan, source)
    plans = {tensor.spec.name: tensor for tensor in plan.tensors}
    return plan.header, lambda spec: np.ascontiguousarray(widen(load(plans[spec.name], source)))
