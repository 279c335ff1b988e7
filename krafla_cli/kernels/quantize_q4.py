"""Q4_0: the 13-candidate fit and the rounding rule, 8 rows at a time, a row in each element of a vector.

A tile is the same block of 8 rows: float32 [32, 8], element j of row r at 8·j + r. Sums follow the specification's
order without any movement between elements: element j of a block goes to partial j mod 8, and the partials are added
((0+4)+(2+6)) + ((1+5)+(3+7)). Where less than 8 rows are left, the last one is computed again in the spare elements.
"""

from __future__ import annotations

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.quantize import BLOCK, F16_MAX, F32_MAX, load_weights, rounded_to_f16
from krafla_cli.kernels.simd import (
    absolute,
    advance,
    as_f16,
    as_f32,
    bits_of,
    from_bits,
    load_f32,
    max_f32,
    maximum,
    minimum,
    select,
    spread_f32,
    store_f16,
    store_f32,
    to_f32,
    transpose_f32,
    truncate,
    zero_f32,
)
from krafla_cli.kernels.simd_quantize import (
    add_squares_f64,
    all_set,
    clear_f64,
    round_even,
    rows_of_columns,
    square_root,
    store_i8x16,
    sum_f64,
)
from krafla_cli.kernels.simd_types import F32x8, F32x16, I32x8, Operands, Pointer
from krafla_cli.kernels.simd_wide import load_f32x16, store_f32x16, sum_of_halves, twice

ROWS_PER_TILE = 8
TILE = BLOCK * ROWS_PER_TILE
_BLOCK_BYTES = BLOCK // 2
_N_CANDIDATES = 13
_LEAST_UNSCALED = np.float32(1e-6)
_LARGEST_UNSCALED = np.float32(1e6)
_LARGEST_POWER = np.float32(2.0**126)
_LEAST_POWER = np.float32(2.0**-126)
_EXPONENT_BITS = 0x7F800000
_INFINITY = np.float32(np.inf)
_ZERO = np.float32(0)
_ONE = np.float32(1)
# Scratch memory, in floats: the tile of weights x, tiles of their weights and of both multiplied, and small vectors.
WEIGHT = TILE
WEIGHT_X = 2 * TILE
LANES = 3 * TILE
_UNITS = LANES + 64
_MEAN_SQUARES = _UNITS + 8
_FACTORS = _MEAN_SQUARES + 8
_SUMS = _FACTORS + 8 * _N_CANDIDATES  # two vectors for each candidate
SCRATCH_FLOATS = _SUMS + 16 * _N_CANDIDATES  # what the fit uses


@inline
def row_of(first: int, r: int, last: int) -> int:
    return min(first + r, last)


@inline
def load_tile(a: Operands, first: int, last: int, b: int, x: Pointer) -> None:
    """Block ``b`` of the tile's rows."""
    for i in range(0, BLOCK, 8):
        t = transpose_f32(
            _weights_of(a, first, last, b, i),
            _weights_of(a, first + 1, last, b, i),
            _weights_of(a, first + 2, last, b, i),
            _weights_of(a, first + 3, last, b, i),
            _weights_of(a, first + 4, last, b, i),
            _weights_of(a, first + 5, last, b, i),
            _weights_of(a, first + 6, last, b, i),
            _weights_of(a, first + 7, last, b, i),
        )
        column = advance(x, 8 * i)
        store_f32(column, 0, t[0])
        store_f32(column, 8, t[1])
        store_f32(column, 16, t[2])
        store_f32(column, 24, t[3])
        store_f32(column, 32, t[4])
        store_f32(column, 40, t[5])
        store_f32(column, 48, t[6])
        store_f32(column, 56, t[7])


@inline
def _weights_of(a: Operands, row: int, last: int, b: int, i: int) -> F32x8:
    """8 weights of block ``b``, from its element ``i`` on, of ``row`` or the last one."""
    return load_weights(a.w, a.kind, (min(row, last) * a.n_blocks + b) * BLOCK + i)


@inline
def _first_largest(x: Pointer) -> tuple[F32x8, F32x8, F32x8]:
    """Of each row: the first element of largest magnitude, this magnitude, and 1 if all are finite, else 0."""
    largest, magnitude, finite = zero_f32(), zero_f32(), spread_f32(_ONE)
    for j in range(0, TILE, 8):
        element = load_f32(x, j)
        size = absolute(element)
        larger = size > magnitude
        largest = select(larger, element, largest)
        magnitude = select(larger, size, magnitude)
        finite = select(size <= F32_MAX, finite, zero_f32())
    return largest, magnitude, finite


@inline
def _report(a: Operands, first: int, last: int, b: int, good: F32x8, scratch: Pointer) -> None:
    """Notes block ``b`` for the rows where ``good`` is 0, unless they have an earlier one."""
    if all_set(good > _ZERO):
        return
    store_f32(scratch, LANES, good)
    for r in range(ROWS_PER_TILE):
        row = row_of(first, r, last)
        if scratch[LANES + r] == _ZERO and a.bad_block[row] < 0:
            a.bad_block[row] = b


@inline
def _rounded_scale(a: Operands, scale: F32x8, scratch: Pointer) -> F32x8:
    """The scale as it is stored; any zero as +0."""
    rounded = scale
    if a.scale_f16 != 0:
        rounded = rounded_to_f16(scale, advance(scratch, LANES))
    return select(absolute(rounded) > _ZERO, rounded, zero_f32())


@inline
def _storable(a: Operands, scale: F32x8, finite: F32x8) -> F32x8:
    """``finite``, and 0 where an f16 scale is too large."""
    if a.scale_f16 != 0:
        return select(absolute(scale) <= F16_MAX, finite, zero_f32())
    return finite


@inline
def _two_bytes(nibbles: Pointer, j: int) -> I32x8:
    """Bytes ``j`` and ``j`` + 1 of each row: element j in the low nibble, element j + 16 in the high one. Exact."""
    low = load_f32(nibbles, 8 * j) + load_f32(nibbles, 8 * (j + 16)) * np.float32(16)
    high = load_f32(nibbles, 8 * (j + 1)) + load_f32(nibbles, 8 * (j + 17)) * np.float32(16)
    return truncate(low + high * np.float32(256))


@inline
def store_tile(a: Operands, first: int, last: int, b: int, scale: F32x8, nibbles: Pointer, scratch: Pointer) -> None:
    """Writes a tile of nibbles, held as float32, and the scales; the spare elements first, then the last row's own."""
    rows = rows_of_columns(
        _two_bytes(nibbles, 0) | (_two_bytes(nibbles, 2) << 16),
        _two_bytes(nibbles, 4) | (_two_bytes(nibbles, 6) << 16),
        _two_bytes(nibbles, 8) | (_two_bytes(nibbles, 10) << 16),
        _two_bytes(nibbles, 12) | (_two_bytes(nibbles, 14) << 16),
    )
    q, n = a.q, a.n_blocks
    store_i8x16(q, (row_of(first, 7, last) * n + b) * _BLOCK_BYTES, rows[7])
    store_i8x16(q, (row_of(first, 6, last) * n + b) * _BLOCK_BYTES, rows[6])
    store_i8x16(q, (row_of(first, 5, last) * n + b) * _BLOCK_BYTES, rows[5])
    store_i8x16(q, (row_of(first, 4, last) * n + b) * _BLOCK_BYTES, rows[4])
    store_i8x16(q, (row_of(first, 3, last) * n + b) * _BLOCK_BYTES, rows[3])
    store_i8x16(q, (row_of(first, 2, last) * n + b) * _BLOCK_BYTES, rows[2])
    store_i8x16(q, (row_of(first, 1, last) * n + b) * _BLOCK_BYTES, rows[1])
    store_i8x16(q, (row_of(first, 0, last) * n + b) * _BLOCK_BYTES, rows[0])
    lanes = advance(scratch, LANES)
    store_f32(lanes, 0, scale)
    store_f16(lanes, 8, scale)
    for r in range(ROWS_PER_TILE - 1, -1, -1):
        block = row_of(first, r, last) * n + b
        if a.scale_f16 != 0:
            as_f16(a.d)[block] = as_f16(lanes)[16 + r]
        else:
            as_f32(a.d)[block] = lanes[r]


def quantize_q4_0_round(a: Operands, begin: int, end: int, x: Pointer) -> None:
    """Q4_0 by the rule of ``--q4-rule round``: the scale is the largest element / -8, levels against it unrounded."""
    last = end - 1
    for first in range(begin, end, ROWS_PER_TILE):
        for r in range(ROWS_PER_TILE):
            a.bad_block[row_of(first, r, last)] = -1
        for b in range(a.n_blocks):
            load_tile(a, first, last, b, x)
            largest, _, finite = _first_largest(x)
            scale = largest / np.float32(-8)
            inverse = _ONE / scale
            scale = select(absolute(inverse) <= F32_MAX, scale, zero_f32())
            _report(a, first, last, b, _storable(a, scale, finite), x)
            stored = _rounded_scale(a, scale, x)
            inverse = select(absolute(stored) > _ZERO, inverse, zero_f32())
            for j in range(0, TILE, 8):
                nibble = to_f32(truncate(load_f32(x, j) * inverse + np.float32(8.5)))
                store_f32(x, j, minimum(nibble, spread_f32(np.float32(15))))
            store_tile(a, first, last, b, stored, x, x)


@inline
def _weigh_partials(x: Pointer, i: int) -> F32x16:
    """Partials ``i`` / 8 and the next of weight · x²; fills their part of the tile of weight · x."""
    total = twice(zero_f32())
    for j in range(i, TILE, 64):
        element, weight = load_f32x16(x, j), load_f32x16(x, WEIGHT + j)
        store_f32x16(x, WEIGHT_X + j, weight * element)
        total = total + weight * (element * element)
    return total


@inline
def _weigh(x: Pointer) -> F32x8:
    """Fills the tile of weight · x from the tiles of x and weights; returns the sums of weight · x²."""
    even = _weigh_partials(x, 0) + _weigh_partials(x, 32)
    return sum_of_halves(even + (_weigh_partials(x, 16) + _weigh_partials(x, 48)))


@inline
def _two_levels(x: Pointer, i: int, factor: F32x16) -> F32x16:
    """The nearest levels of two elements of 8 rows.

    No clamp to -8 is needed: |x · factor| is at most the 8.4 of the last candidate.
    """
    return minimum(round_even(load_f32x16(x, i) * factor), twice(spread_f32(np.float32(7))))


@inline
def _partials(x: Pointer, i: int, factor: F32x16) -> tuple[F32x16, F32x16]:
    """Partials ``i`` / 8 and the next of weight · x · L and of weight · L², for the levels L that ``factor`` gives."""
    j, k, m = i + 64, i + 128, i + 192
    l0, l1 = _two_levels(x, i, factor), _two_levels(x, j, factor)
    l2, l3 = _two_levels(x, k, factor), _two_levels(x, m, factor)
    wx, w = advance(x, WEIGHT_X), advance(x, WEIGHT)
    xl = load_f32x16(wx, i) * l0 + load_f32x16(wx, j) * l1 + load_f32x16(wx, k) * l2 + load_f32x16(wx, m) * l3
    ll = load_f32x16(w, i) * (l0 * l0) + load_f32x16(w, j) * (l1 * l1)
    return xl, ll + load_f32x16(w, k) * (l2 * l2) + load_f32x16(w, m) * (l3 * l3)


@inline
def _add_candidate(x: Pointer, factor: F32x16, sums: Pointer) -> None:
    """The sums of weight · x · L and of weight · L²."""
    xl0, ll0 = _partials(x, 0, factor)
    xl4, ll4 = _partials(x, 32, factor)
    xl2, ll2 = _partials(x, 16, factor)
    xl6, ll6 = _partials(x, 48, factor)
    store_f32(sums, 0, sum_of_halves((xl0 + xl4) + (xl2 + xl6)))
    store_f32(sums, 8, sum_of_halves((ll0 + ll4) + (ll2 + ll6)))


@inline
def _best_candidate(x: Pointer, largest: F32x8) -> tuple[F32x8, F32x8]:
    """The scale and the factor from x to levels of the candidate with the smallest weighted error; the first wins.

    In three loops, so that no candidate waits for the divisions of another.
    """
    sum_xx = _weigh(x)
    factors, sums = advance(x, _FACTORS), advance(x, _SUMS)
    for k in range(_N_CANDIDATES):
        store_f32(factors, 8 * k, np.float32(-(60 + 2 * k)) / np.float32(10) / largest)
    for k in range(_N_CANDIDATES):
        _add_candidate(x, twice(load_f32(factors, 8 * k)), advance(sums, 16 * k))
    best_error, best_factor = spread_f32(_INFINITY), zero_f32()
    best_xl, best_ll = zero_f32(), spread_f32(_ONE)
    for k in range(_N_CANDIDATES):
        sum_xl, sum_ll = load_f32(sums, 16 * k), load_f32(sums, 16 * k + 8)
        error = select(sum_ll > _ZERO, sum_xx - (sum_xl * sum_xl) / sum_ll, sum_xx)
        better = error < best_error
        best_error = select(better, error, best_error)
        best_xl, best_ll = select(better, sum_xl, best_xl), select(better, sum_ll, best_ll)
        best_factor = select(better, load_f32(factors, 8 * k), best_factor)
    return select(best_ll > _ZERO, best_xl / best_ll, zero_f32()), best_factor


@inline
def _measure_rows(a: Operands, first: int, last: int, scratch: Pointer) -> None:
    """Per row: a unit 1 / 2^e, 2^e the power of two at or below the largest magnitude; the mean of (x · unit)²."""
    units, means = advance(scratch, _UNITS), advance(scratch, _MEAN_SQUARES)
    n = a.n_blocks * BLOCK
    for r in range(ROWS_PER_TILE):
        start = row_of(first, r, last) * n
        largest = zero_f32()
        for i in range(start, start + n, 8):
            largest = maximum(absolute(load_weights(a.w, a.kind, i)), largest)
        units[r] = max_f32(largest)
    largest = minimum(maximum(load_f32(units, 0), spread_f32(_LEAST_POWER)), spread_f32(_LARGEST_POWER))
    store_f32(units, 0, _ONE / from_bits(bits_of(largest) & _EXPONENT_BITS))
    for r in range(ROWS_PER_TILE):
        start = row_of(first, r, last) * n
        unit = spread_f32(units[r])
        clear_f64(scratch, 0)
        for i in range(start, start + n, 8):
            add_squares_f64(scratch, 0, load_weights(a.w, a.kind, i) * unit)
        means[r] = np.float32(sum_f64(scratch, 0) / np.float64(n))


@inline
def _weigh_by_importance(a: Operands, b: int, x: Pointer) -> None:
    """The tile of weights importance · sqrt(s² + x²)."""
    units, means = load_f32(x, _UNITS), load_f32(x, _MEAN_SQUARES)
    for j in range(BLOCK):
        scaled = load_f32(x, 8 * j) * units
        store_f32(x, WEIGHT + 8 * j, square_root(means + scaled * scaled) * a.importance[b * BLOCK + j])


@inline
def _weigh_by_square(x: Pointer) -> None:
    for j in range(0, TILE, 16):
        element = load_f32x16(x, j)
        store_f32x16(x, WEIGHT + j, element * element)


@inline
def _replace_zero_weights(x: Pointer) -> None:
    """Makes all weights of a row 1 where all are 0."""
    largest = zero_f32()
    for j in range(0, TILE, 8):
        largest = maximum(load_f32(x, WEIGHT + j), largest)
    if not all_set(largest > _ZERO):
        for j in range(0, TILE, 8):
            weight = load_f32(x, WEIGHT + j)
            store_f32(x, WEIGHT + j, select(largest > _ZERO, weight, spread_f32(_ONE)))


@inline
def _unit_of(magnitude: F32x8) -> F32x8:
    """What a block is divided by: its largest magnitude if that is tiny or huge, else 1."""
    outside = select(magnitude < _LEAST_UNSCALED, magnitude, spread_f32(_ONE))
    outside = select(magnitude > _LARGEST_UNSCALED, magnitude, outside)
    return select(magnitude > _ZERO, outside, spread_f32(_ONE))


@inline
def _divide(x: Pointer, unit: F32x8) -> None:
    for j in range(0, TILE, 8):
        store_f32(x, j, load_f32(x, j) / unit)


@inline
def begin_rows(a: Operands, first: int, last: int, x: Pointer) -> None:
    """What the fit needs of the tile's rows as wholes."""
    for r in range(ROWS_PER_TILE):
        a.bad_block[row_of(first, r, last)] = -1
    if a.has_importance != 0:
        _measure_rows(a, first, last, x)


@inline
def fit_tile(a: Operands, first: int, last: int, b: int, x: Pointer) -> F32x8:
    """Fits a block of 8 rows: leaves its nibbles in the tile ``x`` and returns the scales as they are stored."""
    load_tile(a, first, last, b, x)
    largest, magnitude, finite = _first_largest(x)
    unit = _unit_of(magnitude)
    if a.has_importance != 0:
        _weigh_by_importance(a, b, x)
        _replace_zero_weights(x)
    if not all_set(unit == _ONE):
        _divide(x, unit)
    if a.has_importance == 0:
        _weigh_by_square(x)
    scale, factor = _best_candidate(x, largest / unit)
    scale = scale * unit
    _report(a, first, last, b, _storable(a, scale, finite), x)
    stored = _rounded_scale(a, scale, x)
    # Also where all weights are zero and the factor is infinite.
    factor = select(absolute(stored) > _ZERO, factor, zero_f32())
    both = twice(factor)
    for j in range(0, TILE, 16):
        store_f32x16(x, j, _two_levels(x, j, both) + np.float32(8))
    return stored


def quantize_q4_0_fit(a: Operands, begin: int, end: int, x: Pointer) -> None:
    """Q4_0 by the 13-candidate fit; elements weigh their square or, with an importance, importance · sqrt(s² + x²).

    s² is the mean square of the row. For these weights x is taken in units of the power of two below the row's largest
    magnitude: all weights of a row share the factor, so that no result changes, and the squares of very small and
    very large rows stay inside float32.
    """
    last = end - 1
    for first in range(begin, end, ROWS_PER_TILE):
        begin_rows(a, first, last, x)
        for b in range(a.n_blocks):
            scale = fit_tile(a, first, last, b, x)
            store_tile(a, first, last, b, scale, x, x)
