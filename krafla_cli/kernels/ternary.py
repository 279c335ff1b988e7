"""Products of ternary weights and 8-bit codes (LEMB, section 6.3).

Codes are unsigned (+ 128, which ``offset`` takes away again), weights signed. Two products of at most 255 are at most
510, so that 64 of these sums fit 16 bits: rows of up to 256 columns need no wider sum until their end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import (
    advance,
    as_f32,
    bits_of,
    dot_pairs,
    dot_pairs_i16,
    in_place,
    load_4_bytes,
    load_f32,
    load_i8,
    spread_f32,
    spread_i16,
    store_f32,
    to_f32,
    zero_i16,
)
from krafla_cli.kernels.simd_types import I16x16, I32x8, Operands, Pointer
from krafla_cli.kernels.text_operations import LANES, ROWS_AT_ONCE, ROWS_PER_TILE
from krafla_cli.kernels.threads import next_unit

_GROUP_BYTES = 4 * ROWS_PER_TILE  # four columns of a tile
_GROUPS_IN_16_BITS = 64


def multiply_ternary(a: Operands, batch: Operands, me: Operands) -> None:
    """Operation TERNARY_PRODUCT. A thread takes 16 rows of the matrix and runs all rows of codes over them."""
    inverse = as_f32(me.scratch)
    scale = np.float32(a.scale)
    for t in range(batch.n_tokens):
        inverse[t] = np.float32(1) / (scale * a.x_scale[t])
    unit = next_unit(me, 1)
    while unit < a.n_tiles:
        tile = advance(a.q, unit * a.n_groups * _GROUP_BYTES)
        for t in range(0, batch.n_tokens, ROWS_AT_ONCE):
            p = _products(tile, _four_rows(a.codes, t, a.x_stride), a.n_groups)
            _store(a, unit, t, inverse, (p[0], p[4]))
            _store(a, unit, t + 1, inverse, (p[1], p[5]))
            _store(a, unit, t + 2, inverse, (p[2], p[6]))
            _store(a, unit, t + 3, inverse, (p[3], p[7]))
        unit = next_unit(me, 1)


@inline
def _four_rows(p: Pointer, t: int, stride: int) -> Any:
    return (
        advance(p, t * stride),
        advance(p, (t + 1) * stride),
        advance(p, (t + 2) * stride),
        advance(p, (t + 3) * stride),
    )


@inline
def _products(tile: Pointer, x: tuple[Pointer, ...], n_groups: int) -> Any:
    """8 rows of the tile times four rows of codes, then its other 8 rows: 8 sums i32x8."""
    s = _sums_of_groups(tile, x, 0, min(_GROUPS_IN_16_BITS, n_groups))
    p = (_wide(s[0]), _wide(s[1]), _wide(s[2]), _wide(s[3]), _wide(s[4]), _wide(s[5]), _wide(s[6]), _wide(s[7]))
    for first in range(_GROUPS_IN_16_BITS, n_groups, _GROUPS_IN_16_BITS):
        s = _sums_of_groups(tile, x, first, min(first + _GROUPS_IN_16_BITS, n_groups))
        p = (
            p[0] + _wide(s[0]),
            p[1] + _wide(s[1]),
            p[2] + _wide(s[2]),
            p[3] + _wide(s[3]),
            p[4] + _wide(s[4]),
            p[5] + _wide(s[5]),
            p[6] + _wide(s[6]),
            p[7] + _wide(s[7]),
        )
    return p


@inline
def _wide(s: I16x16) -> I32x8:
    return dot_pairs_i16(s, spread_i16(np.int16(1)))


@inline
def _sums_of_groups(tile: Pointer, x: tuple[Pointer, ...], first: int, end: int) -> Any:
    """Groups ``first`` to ``end``, at most 64: 8 sums i16x16."""
    zero = zero_i16()
    s = (zero, zero, zero, zero, zero, zero, zero, zero)
    n_fours = (end - first) // 4 * 4
    for g in range(first, first + n_fours, 4):
        s = _add_group(tile, x, g, s)
        s = _add_group(tile, x, g + 1, s)
        s = _add_group(tile, x, g + 2, s)
        s = _add_group(tile, x, g + 3, s)
    for g in range(first + n_fours, end):
        s = _add_group(tile, x, g, s)
    return s


@inline
def _add_group(tile: Pointer, x: tuple[Pointer, ...], g: int, s: Any) -> Any:
    """The running sums after group ``g`` of four columns."""
    first = load_i8(tile, _GROUP_BYTES * g)
    second = load_i8(tile, _GROUP_BYTES * g + 32)
    x0 = load_4_bytes(x[0], 4 * g)
    l0 = in_place(s[0] + dot_pairs(x0, first))
    h0 = in_place(s[4] + dot_pairs(x0, second))
    x1 = load_4_bytes(x[1], 4 * g)
    l1 = in_place(s[1] + dot_pairs(x1, first))
    h1 = in_place(s[5] + dot_pairs(x1, second))
    x2 = load_4_bytes(x[2], 4 * g)
    l2 = in_place(s[2] + dot_pairs(x2, first))
    h2 = in_place(s[6] + dot_pairs(x2, second))
    x3 = load_4_bytes(x[3], 4 * g)
    l3 = in_place(s[3] + dot_pairs(x3, first))
    h3 = in_place(s[7] + dot_pairs(x3, second))
    return l0, l1, l2, l3, h0, h1, h2, h3


@inline
def _store(a: Operands, tile: int, t: int, inverse: Pointer, products: Any) -> None:
    _store_half(a, tile * ROWS_PER_TILE, t, inverse[t], products[0])
    _store_half(a, tile * ROWS_PER_TILE + LANES, t, inverse[t], products[1])


@inline
def _store_half(a: Operands, row: int, t: int, inverse: float, products: I32x8) -> None:
    """The exact sums, plus bias, rescaled: 8 values of y."""
    exact = products - bits_of(load_f32(as_f32(a.offset), row))
    value = (to_f32(exact) + load_f32(a.bias, row)) * spread_f32(inverse)
    y = advance(a.y, t * a.y_stride)
    if a.add:
        store_f32(y, row, load_f32(y, row) + value)
    else:
        store_f32(y, row, value)
