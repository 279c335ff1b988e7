"""Q4_0 by the exact minimum of a block's weighted error, starting from the fit.

For a scale d the best levels are those that x / d rounds to. So the best pair of scale and levels is found by letting
t = 1 / |d| grow and looking at each set of levels that appears: an element passes from level k to k + 1 in magnitude at
t = (k + 1/2) / |x|. For each set the best scale is Σ w·x·L / Σ w·L², rounded as it is stored. Both signs of d
give the same sets of magnitudes until an element passes to 8, which it can only against the sign of d. All sums are
float64. The error of the fit bounds the range of t: at its end the clamped largest element alone would cost more, and
at its start an element that is still at level 0.
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
    row_of,
    store_tile,
)
from krafla_cli.kernels.simd import advance, load_f32, max_f32, spread_f32, store_f32
from krafla_cli.kernels.simd_quantize import as_f64, as_i64
from krafla_cli.kernels.simd_types import Operands, Pointer

_MAX_LEVEL = 8
_N_BUCKETS = 128
_MAX_STEPS = BLOCK * _MAX_LEVEL
_INDEX_MASK = BLOCK - 1  # a step's key is its t, with the element's index in the lowest bits
_MARGIN = 1e-9  # of the bounds, for rounding
_LEAST_RANGE = 1e-300
# Scratch memory after that of the fit, in floats.
_NIBBLES = SCRATCH_FLOATS  # a tile
_SCALES = _NIBBLES + TILE
_ORIGINAL = _SCALES + 8  # a tile of weights, and one that its loading needs
_X = _ORIGINAL + 2 * TILE  # of one row: float64 x, weights, weights · |x|; int64 levels
_BUCKETS = _X + 8 * BLOCK  # int64
_UNSORTED = _BUCKETS + 2 * (_N_BUCKETS + 2)  # int64 keys of steps
_SORTED = _UNSORTED + 2 * _MAX_STEPS


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
def _take_row(a: Operands, r: int, x: Pointer, weights: Pointer, row: Pointer) -> float:
    """Copies the block of row ``r`` from the tiles to x, weights and weights · |x|; returns the sum of weight · x²."""
    sum_xx = 0.0
    for j in range(BLOCK):
        element = np.float64(x[8 * j + r])
        weight = np.float64(weights[8 * j + r]) if a.has_importance != 0 else element * element
        row[j] = element
        row[BLOCK + j] = weight
        row[2 * BLOCK + j] = weight * abs(element)
        sum_xx += weight * element * element
    return sum_xx


@inline
def _error_of_fit(row: Pointer, r: int, scale: float, nibbles: Pointer) -> float:
    error = 0.0
    for j in range(BLOCK):
        difference = row[j] - scale * (np.float64(nibbles[8 * j + r]) - 8.0)
        error += row[BLOCK + j] * difference * difference
    return error


@inline
def _range_of_t(row: Pointer, error: float) -> tuple[float, float]:
    """Outside of the range every set of levels has more than ``error``.

    From the end on, the largest element, clamped to 8, has w·(|x| - 8/t)² > error. Before the start, an element
    with w·x² > error is at level 0.
    """
    largest, least, least_costly = 0.0, np.inf, np.inf
    weight = 0.0
    for j in range(BLOCK):
        size = abs(row[j])
        if size > largest:
            largest = size
            weight = row[BLOCK + j]
        if size > 0.0:
            least = min(least, size)
        if row[2 * BLOCK + j] * size > error:
            least_costly = min(least_costly, size)
    rest = largest - np.sqrt(error / weight)
    end = _MAX_LEVEL / (rest if rest > 0.0 else least)
    return 0.5 / least_costly * (1.0 - _MARGIN), end * (1.0 + _MARGIN)


@inline
def _bucket_of(t: float, start: float, per_t: float) -> int:
    return max(min(int((t - start) * per_t), _N_BUCKETS - 1), 0)


@inline
def _steps(row: Pointer, start: float, end: float, scratch: Pointer) -> int:
    """Sorts the steps from ``start`` to ``end`` by t; returns their number. Takes those before: fills the levels."""
    buckets, keys = as_i64(advance(scratch, _BUCKETS)), as_i64(advance(scratch, _UNSORTED))
    levels = as_i64(row)
    for k in range(_N_BUCKETS + 1):
        buckets[k] = 0
    per_t = _N_BUCKETS / max(end - start, _LEAST_RANGE)
    n = 0
    for j in range(BLOCK):
        level = 0
        if row[2 * BLOCK + j] > 0.0:
            width = 1.0 / abs(row[j])
            for k in range(_MAX_LEVEL):
                t = (k + 0.5) * width
                if t >= end:
                    break
                if t < start:
                    level += 1
                else:
                    buckets[_bucket_of(t, start, per_t) + 1] += 1
                    keys[n] = np.float64(t).view(np.int64) & ~_INDEX_MASK | j
                    n += 1
        levels[3 * BLOCK + j] = level
    _sort(keys, n, start, per_t, buckets, as_i64(advance(scratch, _SORTED)))
    return n


@inline
def _sort(keys: Pointer, n: int, start: float, per_t: float, buckets: Pointer, out: Pointer) -> None:
    """Sorts ``n`` keys into ``out``, by bucket and then by insertion; ``buckets[k + 1]`` counts those of bucket k."""
    for k in range(1, _N_BUCKETS):
        buckets[k + 1] += buckets[k]
    for i in range(n):
        t = np.int64(keys[i] & ~_INDEX_MASK).view(np.float64)
        k = _bucket_of(t, start, per_t)
        out[buckets[k]] = keys[i]
        buckets[k] += 1
    for i in range(1, n):
        key = out[i]
        j = i - 1
        while j >= 0 and out[j] > key:
            out[j + 1] = out[j]
            j -= 1
        out[j + 1] = key


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
def _best_scale(a: Operands, row: Pointer, n_steps: int, sum_xx: float, error: float, scratch: Pointer) -> float:
    """The scale of the set of levels with the smallest error below ``error``; 0 where there is none."""
    keys, levels = as_i64(advance(scratch, _SORTED)), as_i64(row)
    best = 0.0
    plus_xl = plus_ll = 0.0
    for j in range(BLOCK):
        level = np.float64(levels[3 * BLOCK + j])
        plus_xl += row[2 * BLOCK + j] * level
        plus_ll += row[BLOCK + j] * level * level
    minus_xl, minus_ll = plus_xl, plus_ll
    signs_differ = False
    error, best = _consider(a, 1.0, plus_xl, plus_ll, sum_xx, error, best, scratch)
    for i in range(n_steps):
        j = keys[i] & _INDEX_MASK
        level = levels[3 * BLOCK + j]
        levels[3 * BLOCK + j] = level + 1
        to_xl, to_ll = row[2 * BLOCK + j], row[BLOCK + j] * (2 * level + 1)
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
    return best


@inline
def _error_of(row: Pointer, scale: float) -> float:
    error = 0.0
    for j in range(BLOCK):
        difference = row[j] - scale * _level(row[j], scale)
        error += row[BLOCK + j] * difference * difference
    return error


@inline
def _improve_row(a: Operands, r: int, scale: float, scratch: Pointer) -> float:
    """The best scale for the block of row ``r``; rewrites the row's nibbles where it is not the fit's ``scale``."""
    row = as_f64(advance(scratch, _X))
    nibbles = advance(scratch, _NIBBLES)
    sum_xx = _take_row(a, r, advance(scratch, _ORIGINAL), advance(scratch, WEIGHT), row)
    error = _error_of_fit(row, r, scale, nibbles)
    start, end = _range_of_t(row, error)
    best = _best_scale(a, row, _steps(row, start, end, scratch), sum_xx, error, scratch)
    if best == 0.0 or _error_of(row, best) >= error:
        return scale
    for j in range(BLOCK):
        nibbles[8 * j + r] = np.float32(_level(row[j], best) + 8.0)
    return best


def quantize_q4_0_best(a: Operands, begin: int, end: int, x: Pointer) -> None:
    """Q4_0 by the exact minimum of the weighted error; weights as in the fit. Never worse than the fit."""
    last = end - 1
    nibbles, scales = advance(x, _NIBBLES), advance(x, _SCALES)
    for first in range(begin, end, ROWS_PER_TILE):
        begin_rows(a, first, last, x)
        for b in range(a.n_blocks):
            store_f32(scales, 0, fit_tile(a, first, last, b, x))
            for j in range(0, TILE, 8):
                store_f32(nibbles, j, load_f32(x, j))
            load_tile(a, first, last, b, advance(x, _ORIGINAL))  # the fit may have divided its tile
            for r in range(min(ROWS_PER_TILE, end - first)):
                if a.bad_block[row_of(first, r, last)] < 0:
                    scales[r] = np.float32(_improve_row(a, r, np.float64(scales[r]), x))
            store_tile(a, first, last, b, load_f32(scales, 0), nibbles, x)
