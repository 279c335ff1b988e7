"""One tensor from the checkpoint to the arrays of the file: rows taken and reordered, padded, quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.plan import Plan, TensorPlan
from krafla_cli.convert.sources import Source
from krafla_cli.errors import DataError
from krafla_cli.formats.mlb import TensorSpec
from krafla_cli.formats.text import printable
from krafla_cli.quant import ggml_blocks
from krafla_cli.quant.blocks import Quantized, WeightError, widen
from krafla_cli.quant.errors import Errors, errors_of
from krafla_cli.quant.matrix import empty, quantize_into
from krafla_cli.quant.q4_0 import Rule

Float32s = npt.NDArray[np.float32]
Arrays: TypeAlias = tuple[npt.NDArray[Any], ...]
_WEIGHTS_PER_PART = 1 << 19
_ROWS_PER_TILE = 8  # of the quantizers: only the last part may have a broken tile


@dataclass(frozen=True)
class Weights:
    """A tensor of a checkpoint, ``array`` [source rows, cols] or [n], read in the shape and row order of the .mlb."""

    plan: TensorPlan
    array: npt.NDArray[Any]

    def rows(self, first: int, end: int) -> npt.NDArray[Any]:
        """Rows ``first`` to ``end`` of the .mlb: float32, float16, or uint16 holding the bits of bfloat16.

        Copied only where they are reordered, padded or changed.
        """
        order = self.plan.rows
        part = self.array[first:end] if order is None else self.array[order[first:end]]
        if self.plan.columns is not None:
            part = part[:, self.plan.columns]
        if self.plan.plus_one:
            part = widen(part) + np.float32(1)
        if self.plan.transform is not None:
            part = self.plan.transform.load(widen(part))
        return _padded(part, (end - first, *self.plan.spec.shape[1:]))


def open_weights(plan: TensorPlan, source: Source) -> Weights:
    """The tensor, mapped where the source can be; nothing is read yet."""
    array = source.array(plan.source)
    is_matrix = len(plan.spec.shape) == 2
    return Weights(plan, array.reshape(plan.source_rows, -1) if is_matrix else array.reshape(-1))


def load(plan: TensorPlan, source: Source) -> npt.NDArray[Any]:
    """The whole tensor in the shape and row order of the .mlb, of the types of :meth:`Weights.rows`."""
    return open_weights(plan, source).rows(0, plan.spec.shape[0])


def _padded(array: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """``array`` with zero rows and columns up to ``shape``; zero bits are zero in every type."""
    if array.shape == shape:
        return array
    padded = np.zeros(shape, array.dtype)
    padded[tuple(slice(n) for n in array.shape)] = array
    return padded


@dataclass(frozen=True)
class Quantizer:
    """How matrices are quantized: type of the scales, rule of Q4_0 blocks; and whether their error is found."""

    scale_f16: bool
    rule: Rule
    measure: bool = False


@dataclass(frozen=True)
class Encoding:
    """A tensor on its way into the file.

    ``run(part)`` for each of ``parts``, ranges of rows in order, fills these rows of ``arrays`` (one of float32, or
    quants and scales) and returns their errors if they are measured. Parts may run in any order and at the same time.
    It raises DataError naming the checkpoint's tensor, row and column: a NaN, an infinity, a scale beyond f16.
    ``n_anew``: Q8_0 blocks with -128 of the source, which had to be quantized again.
    """

    plan: TensorPlan
    arrays: Arrays
    parts: list[range]
    run: Callable[[range], Errors]
    n_anew: int = 0


def encoding_of(plan: TensorPlan, source: Source, quantizer: Quantizer, importance: Float32s | None = None) -> Encoding:
    """How ``plan`` is carried out; blocks of the source that are kept are copied here. Raises DataError."""
    if not plan.spec.is_quantized:
        return _plain(open_weights(plan, source), source)
    if plan.copied:
        return _copied(plan, source, quantizer, importance)
    weights = open_weights(plan, source)
    encoding = plan.spec.encoding
    matrix = empty(encoding, plan.spec.shape, quantizer.scale_f16)

    def run(part: range) -> Errors:
        w, rows = weights.rows(part.start, part.stop), _rows_of(matrix, part)
        try:
            quantize_into(rows, w, encoding, quantizer.rule, importance)
        except WeightError as error:
            raise _data_error(error, plan, source, part.start) from error
        return errors_of(w, rows, encoding, importance) if quantizer.measure else Errors()

    return Encoding(plan, (matrix.q, matrix.d), _parts(plan.spec), run)


def _copied(plan: TensorPlan, source: Source, quantizer: Quantizer, importance: Float32s | None) -> Encoding:
    """A matrix whose blocks are kept; its parts only measure."""
    arrays, n_anew = copied_blocks(plan, source, quantizer.scale_f16)
    if not quantizer.measure:
        return Encoding(plan, arrays, [], lambda _: Errors(), n_anew)
    weights, matrix = open_weights(plan, source), Quantized(*arrays)

    def run(part: range) -> Errors:
        w = weights.rows(part.start, part.stop)
        return errors_of(w, _rows_of(matrix, part), plan.spec.encoding, importance)

    return Encoding(plan, arrays, _parts(plan.spec), run, n_anew)


def _plain(weights: Weights, source: Source) -> Encoding:
    """A tensor that stays float32."""
    spec = weights.plan.spec
    values = np.empty(spec.shape, np.float32)

    def run(part: range) -> Errors:
        values[:] = widen(weights.rows(part.start, part.stop))
        _check_finite(values, weights.plan, source)
        return Errors()

    return Encoding(weights.plan, (values,), [range(spec.shape[0])], run)


def _parts(spec: TensorSpec) -> list[range]:
    """The rows in parts of about half a million weights."""
    tiles = max(1, _WEIGHTS_PER_PART // (spec.shape[1] * _ROWS_PER_TILE))
    step = tiles * _ROWS_PER_TILE
    return [range(first, min(first + step, spec.shape[0])) for first in range(0, spec.shape[0], step)]


def _rows_of(matrix: Quantized, part: range) -> Quantized:
    return Quantized(matrix.q[part.start : part.stop], matrix.d[part.start : part.stop])


def copied_blocks(plan: TensorPlan, source: Source, scale_f16: bool) -> tuple[Arrays, int]:
    """The source's own quants and scales, rows in the order of the .mlb; and how many blocks are not as they were.

    Those are Q8_0 blocks with -128, which the format refuses: they are quantized anew. Scales become float32 without
    loss where the file has such. Raises DataError for a scale that is NaN or infinite.
    """
    stored = source.blocks(plan.source)
    if plan.rows is not None:
        stored = Quantized(stored.q[plan.rows], stored.d[plan.rows])
    blocks = ggml_blocks.block_order(plan.columns) if plan.columns is not None else None
    if blocks is not None:
        stored = ggml_blocks.with_block_order(stored, blocks)
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


def _data_error(error: WeightError, plan: TensorPlan, source: Source, first_row: int = 0) -> DataError:
    row = _source_row(plan, first_row + error.row)
    column = error.column if plan.columns is None else int(plan.columns[error.column])
    return DataError(f"{source.title}: {printable(plan.source)}: row {row}, column {column}: {error.reason}")


def check_tied_head(plan: Plan, source: Source) -> None:
    """Refuses to leave out a classifier that is not the embedding, whatever tie_word_embeddings says.

    Some readers then use the one, some the other. Blocks are not compared: both tensors may be quantized differently.
    Raises DataError naming the first row that differs.
    """
    if plan.tied_head is None:
        return
    names = (plan.tensors[0].source, plan.tied_head)
    if any(source.dtype(name) not in ("F32", "F16", "BF16") for name in names):
        return
    embedding, head = (source.array(name) for name in names)
    row = _first_difference(embedding, head)
    source.release(plan.tied_head)
    if row is not None:
        raise DataError(
            f"{source.title}: tie_word_embeddings is true, but {printable(plan.tied_head)} is not "
            f"{printable(names[0])}: row {row} differs; with tie_word_embeddings false in config.json it is used"
        )


def _first_difference(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int | None:
    """The first row in which two matrices differ: at all, or if their types do, by more than bfloat16 rounds."""
    if one.shape != other.shape:
        return min(len(one), len(other))
    rows_per_part = max(1, _WEIGHTS_PER_PART // one.shape[1])
    for first in range(0, len(one), rows_per_part):
        a, b = one[first : first + rows_per_part], other[first : first + rows_per_part]
        same = a == b if a.dtype == b.dtype else np.isclose(widen(a), widen(b), rtol=2.0**-7, atol=1e-7)
        if not same.all():
            return first + int(np.argmin(same.all(axis=1)))
    return None


def _check_finite(values: Float32s, plan: TensorPlan, source: Source) -> None:
    if np.isfinite(values).all():
        return
    place = tuple(int(i[0]) for i in np.nonzero(~np.isfinite(values)))
    where = f"row {_source_row(plan, place[0])}" + (f", column {place[1]}" if len(place) > 1 else "")
    raise DataError(f"{source.title}: {printable(plan.source)}: {where}: the weight is {values[place]}")


def _source_row(plan: TensorPlan, row: int) -> int:
    return row if plan.rows is None else int(plan.rows[row])


def errors_against_source(
    plan: TensorPlan, source: Source, matrix: Quantized, importance: Float32s | None = None
) -> Errors:
    """The errors of a quantized tensor, taken from a file, against the checkpoint's weights."""
    weights, total = open_weights(plan, source), Errors()
    for part in _parts(plan.spec):
        rows = weights.rows(part.start, part.stop)
        total += errors_of(rows, _rows_of(matrix, part), plan.spec.encoding, importance)
    return total
