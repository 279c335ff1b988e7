"""One tensor from the checkpoint to the arrays of the file: rows taken and reordered, padded, quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.plan import TensorPlan
from krafla_cli.convert.sources import Source
from krafla_cli.errors import DataError
from krafla_cli.formats.mlb import TensorSpec
from krafla_cli.formats.text import printable
from krafla_cli.quant.blocks import WeightError, widen
from krafla_cli.quant.matrix import dequantize, quantize
from krafla_cli.quant.q4_0 import Rule

Float32s = npt.NDArray[np.float32]
Arrays: TypeAlias = tuple[npt.NDArray[Any], ...]
_CHUNK_WEIGHTS = 1 << 18  # of the error's sums: fits the cache


def load(plan: TensorPlan, source: Source) -> npt.NDArray[Any]:
    """The tensor in the shape and row order of the .mlb: float32, float16, or uint16 holding the bits of bfloat16."""
    array = source.array(plan.source)
    array = array.reshape(array.shape[0], -1) if len(plan.spec.shape) == 2 else array.reshape(-1)
    if plan.rows is not None:
        array = array[plan.rows]
    if plan.plus_one:
        array = widen(array) + np.float32(1)
    return _padded(array, plan.spec)


def _padded(array: npt.NDArray[Any], spec: TensorSpec) -> npt.NDArray[Any]:
    """``array`` with zero rows and columns up to the spec's shape; zero bits are zero in every type."""
    if array.shape == spec.shape:
        return array
    padded = np.zeros(spec.shape, array.dtype)
    padded[tuple(slice(n) for n in array.shape)] = array
    return padded


@dataclass(frozen=True)
class Quantizer:
    """How matrices are quantized: type of the scales, rule of Q4_0 blocks, threads (None: the physical cores)."""

    scale_f16: bool
    rule: Rule
    threads: int | None = None


def encode(plan: TensorPlan, source: Source, quantizer: Quantizer, importance: Float32s | None = None) -> Arrays:
    """The arrays to write for the tensor: one of float32, or quants and scales.

    Raises DataError naming the checkpoint's tensor, row and column: a NaN, an infinity, a scale beyond f16.
    """
    array = load(plan, source)
    if not plan.spec.is_quantized:
        values = np.ascontiguousarray(widen(array))
        _check_finite(values, plan, source)
        return (values,)
    try:
        result = quantize(array, plan.spec.encoding, quantizer.scale_f16, quantizer.rule, importance, quantizer.threads)
    except WeightError as error:
        row = _source_row(plan, error.row)
        raise DataError(
            f"{source.title}: {printable(plan.source)}: row {row}, column {error.column}: {error.reason}"
        ) from error
    return result.q, result.d


def _check_finite(values: Float32s, plan: TensorPlan, source: Source) -> None:
    if np.isfinite(values).all():
        return
    place = tuple(int(i[0]) for i in np.nonzero(~np.isfinite(values)))
    where = f"row {_source_row(plan, place[0])}" + (f", column {place[1]}" if len(place) > 1 else "")
    raise DataError(f"{source.title}: {printable(plan.source)}: {where}: the weight is {values[place]}")


def _source_row(plan: TensorPlan, row: int) -> int:
    return row if plan.rows is None else int(plan.rows[row])


def relative_error(plan: TensorPlan, source: Source, arrays: Arrays) -> float:
    """Root of the summed squared error of a quantized tensor over the summed squares of its weights."""
    q, d = arrays
    w = load(plan, source)
    error = total = 0.0
    step = max(1, _CHUNK_WEIGHTS // w.shape[1])
    for start in range(0, len(w), step):
        rows = slice(start, start + step)
        exact = widen(w[rows])
        difference = exact - dequantize(q[rows], d[rows], plan.spec.encoding, *exact.shape)
        error += float(np.vdot(difference, difference))
        total += float(np.vdot(exact, exact))
    return float((error / total) ** 0.5) if total else 0.0
