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
from krafla_cli.quant import ggml_blocks
from krafla_cli.quant.blocks import Quantized, WeightError, widen
from krafla_cli.quant.matrix import dequantize, quantize
from krafla_cli.quant.q4_0 import Rule

Float32s = npt.NDArray[np.float32]
Arrays: TypeAlias = tuple[npt.NDArray[Any], ...]
_CHUNK_WEIGHTS = 1 << 18  # of the error's sums: fits the cache


def load(plan: TensorPlan, source: Source) -> npt.NDArray[Any]:
    """The tensor in the shape and row order of the .mlb: float32, float16, or uint16 holding the bits of bfloat16."""
    array = source.array(plan.source)
    array = array.reshape(plan.source_rows, -1) if len(plan.spec.shape) == 2 else array.reshape(-1)
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
        raise _data_error(error, plan, source) from error
    return result.q, result.d


def copied_blocks(plan: TensorPlan, source: Source, scale_f16: bool) -> tuple[Arrays, int]:
    """The source's own quants and scales, rows in the order of the .mlb; and how many blocks are not as they were.

    Those are Q8_0 blocks with -128, which the format refuses: they are quantized anew. Scales become float32 without
    loss where the file has such. Raises DataError for a scale that is NaN or infinite.
    """
    stored = source.blocks(plan.source)
    if plan.rows is not None:
        stored = Quantized(stored.q[plan.rows], stored.d[plan.rows])
    try:
        ggml_blocks.check_scales(stored)
    except WeightError as error:
        raise _data_error(error, plan, source) from error
    stored, n_anew = ggml_blocks.without_minus_128(stored) if plan.spec.encoding == "q8_0" else (stored, 0)
    n_missing = plan.spec.shape[0] - len(stored.d)
    if n_missing:
        zeros = ggml_blocks.zero_blocks(plan.spec.encoding, n_missing, stored.d.shape[1])
        stored = Quantized(np.concatenate([stored.q, zeros.q]), np.concatenate([stored.d, zeros.d]))
    d = stored.d if scale_f16 else stored.d.astype(np.float32)
    return (np.ascontiguousarray(stored.q), np.ascontiguousarray(d)), n_anew


def _data_error(error: WeightError, plan: TensorPlan, source: Source) -> DataError:
    row = _source_row(plan, error.row)
    return DataError(f"{source.title}: {printable(plan.source)}: row {row}, column {error.column}: {error.reason}")


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
