"""Q4_0 by the exact minimum of a block's weighted error, starting from the fit.

For a scale d the best levels are those that x / d rounds to. So the best pair of scale and levels is found by letting
t = 1 / |d| grow and looking at each set of levels that appears: an element passes from level k to k + 1 in magnitude at
t = (k + 1/2) / |x|. For each set the best scale is Σ w·x·L / Σ w·L², rounded as it is stored. Both signs of d
give the same sets of magnitudes until an element passes to 8, which it can only against the sign of d.

Most of the range of t cannot hold a better pair, and is left out first, for 8 rows at once: it is cut into intervals,
and within one, an element's error is at least the smaller one of those at its two ends, unless x·t passes an integer.
These bounds are float32 with a margin for their rounding; all sums that decide are float64.
"""

from __future__ import annotations

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.quantize import BLOCK, F16_MAX, rounded_to_f16
from krafla_cli.kernels.quantize_q4 import (
    LANES,
    ROWS_PER_TILE,
    SCRATCH_FLOATS,
    TILE,
    WEIGHT,
    begin_rows,
    fit_tile,
    load_tile,
    store_tile,
)
from krafla_cli.kernels.simd import (
    advance,
    load_f32,
    max_f32,
    minimum,
    select,
    spread_f32,
    store_f32,
    to_f32,
    truncate,
    zero_f32,
)
from krafla_cli.kernels.simd_quantize import as_f64, as_i64, round_even
from krafla_cli.kernels.simd_types import Operands, Pointer

_MAX_LEVEL = 8
_N_INTERVALS = 64
_INDEX_MASK = BLOCK - 1  # a step's key is its t, with the element's index in the lowest bits
_ONE = np.float32(1)
_MARGIN = 1e-5  # of the ends of intervals, whose bounds are computed in float32
# Scratch memory after that of the fit, in floats.
_NIBBLES = SCRATCH_FLOATS  # a tile
_ORIGINAL = _NIBBLES + TILE  # a tile of weights, and one that its loading needs
_SIZES = _ORIGINAL + 2 * TILE  # a tile of magnitudes, relative to the largest of the row
_WEIGHTS = _SIZES + TILE  # likewise
_ERRORS = _WEIGHTS + TILE  # a tile of errors at the start of an interval
_WHOLE = _ERRORS + TILE  # and of the levels' whole parts there
_BOUNDS = _WHOLE + TILE  # a vector for each interval
_SCALES = _BOUNDS + 8 * _N_INTERVALS  # vectors
_STARTS = _SCALES + 8
_WIDTHS = _STARTS + 8
_LIMITS = _WIDTHS + 8
_KEYS = _LIMITS + 8  # int64 keys of steps
_ROWS = _KEYS + 2 * BLOCK * _MAX_LEVEL  # float64 values of each row:
_ROW = 2 * (4 * BLOCK + 8)
_W, _WX, _LEVELS = BLOCK, 2 * BLOCK, 3 * BLOCK  # x, its weights, weights · |x|, int64 levels,
_SUM_XX, _FIT_ERROR, _START, _WIDTH = 4 * BLOCK, 4 * BLOCK + 1, 4 * BLOCK + 2, 4 * BLOCK + 3


@inline
def _row_at(scratch: Pointer, r: int) -> Pointer:
    return as_f64(advance(scratch, _ROWS + _ROW * r))


@inline
def _stored(a: Operands, scale: float, scratch: Pointer) -> float:
    """The positive scale as it is stored, float64; 0 if it cannot be."""
    if a.scale_f16 == 0:
        return np.float64(np.float32(scale))
    if scale > F16_MAX:
        return 0.0
    return np.float64(max_f32(rounded_to_f16(spread_f32(np.float32(scale)), advance(scratch, LANES))))


@inline
def _level(x: float, scale: float) -> float:
    return min(max(np.rint(x / scale), -8.0), 7.0)


@inline
def _take_row(a: Operands, r: int, scratch: Pointer) -> None:
    """Copies the block of row ``r`` from the tiles; adds up weight · x², and the error of the fit."""
    x, weights, nibbles = advance(scratch, _ORIGINAL), advance(scratch, WEIGHT), advance(scratch, _NIBBLES)
    row, scale = _row_at(scratch, r), np.float64(scratch[_SCALES + r])
    sum_xx = error = 0.0
    for j in range(BLOCK):
        element = np.float64(x[8 * j + r])
        weight = np.float64(weights[8 * j + r]) if a.has_importance != 0 else element * element
        row[j] = element
        row[_W + j] = weight
        row[_WX + j] = weight * abs(element)
        sum_xx += weight * element * element
        difference = element - scale * (np.float64(nibbles[8 * j + r]) - 8.0)
        error += weight * difference * difference
    row[_SUM_XX] = sum_xx
    row[_FIT_ERROR] = error


@inline
def _error_of(row: Pointer, scale: float) -> float:
    error = 0.0
    for j in range(BLOCK):
        difference = row[j] - scale * _level(row[j], scale)
        error += row[_W + j] * difference * difference
    return error


# ---------------------------------------------------------------------------------------------------------------------
# The intervals of t that can hold a smaller error


@inline
def _prepare_row(r: int, scratch: Pointer) -> None:
    """The range of t, and what its bounds need: sizes, weights, t and errors relative to the largest of the row.

    From the end of the range on, the largest element, clamped to 8, has w·(|x| - 8/t)² > error. Before its start, an
    element with w·x² > error is at level 0, or all are.
    """
    row = _row_at(scratch, r)
    error, sum_xx = row[_FIT_ERROR], row[_SUM_XX]
    largest, heaviest, largest_weight = 0.0, 0.0, 0.0
    least, least_costly = np.inf, np.inf
    for j in range(BLOCK):
        size, weight = abs(row[j]), row[_W + j]
        if size > largest:
            largest, largest_weight = size, weight
        heaviest = max(heaviest, weight)
        if size > 0.0:
            least = min(least, size)
        if row[_WX + j] * size > error:
            least_costly = min(least_costly, size)
    to_size, to_weight = 1.0 / largest, 1.0 / heaviest
    for j in range(BLOCK):
        scratch[_SIZES + 8 * j + r] = np.float32(abs(row[j]) * to_size)
        scratch[_WEIGHTS + 8 * j + r] = np.float32(row[_W + j] * to_weight)
    rest = largest - np.sqrt(error / largest_weight)
    start = 0.5 / min(least_costly, largest)
    end = _MAX_LEVEL / (rest if rest > 0.0 else least)
    rounding = 1e-5 * (error + np.sqrt(error * sum_xx)) + 1e-10 * sum_xx
    limit = (error + rounding) / heaviest / (largest * largest)
    row[_START] = start
    row[_WIDTH] = (end - start) / _N_INTERVALS
    scratch[_STARTS + r] = np.float32(start * largest)
    scratch[_WIDTHS + r] = np.float32(row[_WIDTH] * largest)
    scratch[_LIMITS + r] = np.float32(limit if end > start else -1.0)


@inline
def _bound_intervals(x: Pointer) -> None:
    """Fills the least error that each interval can hold, for 8 rows."""
    start, width = load_f32(x, _STARTS), load_f32(x, _WIDTHS)
    most = spread_f32(np.float32(_MAX_LEVEL))
    for i in range(_N_INTERVALS + 1):
        t = start + width * np.float32(i)
        d = _ONE / t
        bound = zero_f32()
        for j in range(0, TILE, 8):
            size = load_f32(x, _SIZES + j)
            level = minimum(size * t, most)
            rest = size - round_even(level) * d
            error = load_f32(x, _WEIGHTS + j) * (rest * rest)
            whole = to_f32(truncate(level))
            least = minimum(error, load_f32(x, _ERRORS + j))
            bound = bound + select(whole == load_f32(x, _WHOLE + j), least, zero_f32())
            store_f32(x, _ERRORS + j, error)
            store_f32(x, _WHOLE + j, whole)
        if i > 0:
            store_f32(x, _BOUNDS + 8 * (i - 1), bound)


# ---------------------------------------------------------------------------------------------------------------------
# The sets of levels within an interval


@inline
def _level_at(size: float, t: float) -> int:
    return int(min(size * t + 0.5, 8.0))


@inline
def _list_steps(row: Pointer, start: float, end: float, keys: Pointer) -> int:
    """Lists the steps from ``start`` to ``end``, sorted by t; returns their number. Fills the levels at the start."""
    levels = as_i64(row)
    n = 0
    for j in range(BLOCK):
        size = abs(row[j])
        level = _level_at(size, start)
        levels[_LEVELS + j] = level
        for k in range(level, _level_at(size, end)):
            _insert(keys, n, int(np.float64((k + 0.5) / size).view(np.int64)) & ~_INDEX_MASK | j)
            n += 1
    return n


@inline
def _insert(keys: Pointer, n: int, key: int) -> None:
    """Puts ``key`` in its place among ``n`` sorted ones."""
    i = n
    while i > 0 and keys[i - 1] > key:
        keys[i] = keys[i - 1]
        i -= 1
    keys[i] = key


@inline
def _consider(
    a: Operands, sign: float, sum_xl: float, sum_ll: float, sum_xx: float, error: float, best: float, scratch: Pointer
) -> tuple[float, float]:
    """The smaller error and its scale: those given, or those of a set of levels with the given sums."""
    # What the set gains at most, before its scale is rounded.
    if sum_xl * sum_xl > (sum_xx - error) * sum_ll:
        scale = _stored(a, sum_xl / sum_ll, scratch)
        new_error = sum_xx - 2.0 * scale * sum_xl + scale * scale * sum_ll
        if new_error < error:
            return new_error, sign * scale
    return error, best


@inline
def _search(
    a: Operands, row: Pointer, start: float, end: float, error: float, best: float, scratch: Pointer
) -> tuple[float, float]:
    """The smaller error and its scale: those given, or those of a set of levels for t from ``start`` to ``end``."""
    keys, levels, sum_xx = as_i64(advance(scratch, _KEYS)), as_i64(row), row[_SUM_XX]
    n_steps = _list_steps(row, start, end, keys)
    sum_xl = sum_ll = 0.0
    plus_xl = plus_ll = minus_xl = minus_ll = 0.0  # the sums for a positive and for a negative scale
    signs_differ = False
    for j in range(BLOCK):
        level = levels[_LEVELS + j]
        sum_xl += row[_WX + j] * level
        sum_ll += row[_W + j] * (level * level)
        if level == _MAX_LEVEL:
            signs_differ = True
            if row[j] > 0.0:
                plus_xl -= row[_WX + j]
                plus_ll -= row[_W + j] * (8 * 8 - 7 * 7)
            else:
                minus_xl -= row[_WX + j]
                minus_ll -= row[_W + j] * (8 * 8 - 7 * 7)
    plus_xl, plus_ll = plus_xl + sum_xl, plus_ll + sum_ll
    minus_xl, minus_ll = minus_xl + sum_xl, minus_ll + sum_ll
    error, best = _consider(a, 1.0, plus_xl, plus_ll, sum_xx, error, best, scratch)
    error, best = _consider(a, -1.0, minus_xl, minus_ll, sum_xx, error, best, scratch)
    for i in range(n_steps):
        j = keys[i] & _INDEX_MASK
        level = levels[_LEVELS + j]
        levels[_LEVELS + j] = level + 1
        to_xl, to_ll = row[_WX + j], row[_W + j] * (2 * level + 1)
        to_last = level == _MAX_LEVEL - 1
        signs_differ = signs_differ or to_last
        if not to_last or row[j] < 0.0:
            plus_xl += to_xl
            plus_ll += to_ll
        if not to_last or row[j] > 0.0:
            minus_xl += to_xl
            minus_ll += to_ll
        error, best = _consider(a, 1.0, plus_xl, plus_ll, sum_xx, error, best, scratch)
        if signs_differ:
            error, best = _consider(a, -1.0, minus_xl, minus_ll, sum_xx, error, best, scratch)
    return error, best


@inline
def _improve_row(a: Operands, r: int, scratch: Pointer) -> float:
    """The best scale for the block of row ``r``; rewrites the row's nibbles where it is not that of the fit."""
    row, bounds = _row_at(scratch, r), advance(scratch, _BOUNDS)
    limit = scratch[_LIMITS + r]
    error, best = row[_FIT_ERROR], 0.0
    first = 0
    while first < _N_INTERVALS:
        last = first
        while last < _N_INTERVALS and not bounds[8 * last + r] > limit:
            last += 1
        if last > first:
            start = (row[_START] + first * row[_WIDTH]) * (1.0 - _MARGIN)
            end = (row[_START] + last * row[_WIDTH]) * (1.0 + _MARGIN)
            error, best = _search(a, row, start, end, error, best, scratch)
        first = last + 1
    if best == 0.0 or _error_of(row, best) >= row[_FIT_ERROR]:
        return np.float64(scratch[_SCALES + r])
    for j in range(BLOCK):
        scratch[_NIBBLES + 8 * j + r] = np.float32(_level(row[j], best) + 8.0)
    return best


@inline
def _improve_tile(a: Operands, first: int, last: int, x: Pointer) -> None:
    """Replaces scales and nibbles of the rows that have better ones than those of the fit."""
    n_rows = min(ROWS_PER_TILE, last + 1 - first)
    for r in range(n_rows):
        _take_row(a, r, x)
        _prepare_row(r, x)
    _bound_intervals(x)
    for r in range(n_rows):
        if a.bad_block[first + r] < 0 and _row_at(x, r)[_FIT_ERROR] > 0.0:
            x[_SCALES + r] = np.float32(_improve_row(a, r, x))


def quantize_q4_0_best(a: Operands, begin: int, end: int, x: Pointer) -> None:
    """Q4_0 by the exact minimum of the weighted error; weights as in the fit. Never worse than the fit."""
    last = end - 1
    for first in range(begin, end, ROWS_PER_TILE):
        begin_rows(a, first, last, x)
        for b in range(a.n_blocks):
            store_f32(x, _SCALES, fit_tile(a, first, last, b, x))
            for j in range(0, TILE, 8):
                store_f32(x, _NIBBLES + j, load_f32(x, j))
            load_tile(a, first, last, b, advance(x, _ORIGINAL))  # the fit may have divided its tile
            _improve_tile(a, first, last, x)
            store_tile(a, first, last, b, load_f32(x, _SCALES), advance(x, _NIBBLES), x)
