"""Products of float32 matrices: one chain of fused multiply-adds over the columns for each value, in their order."""

from __future__ import annotations

from typing import Any

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import advance, fma, load_f32, spread_f32, store_f32, zero_f32
from krafla_cli.kernels.simd_types import F32x8, Operands, Pointer
from krafla_cli.kernels.text_operations import LANES, ROWS_AT_ONCE, ROWS_PER_TILE
from krafla_cli.kernels.threads import next_unit


def multiply_dense(a: Operands, batch: Operands, me: Operands) -> None:
    """Operation DENSE_PRODUCT. A thread takes 16 rows of the matrix and runs all rows of x over them."""
    n_rows = batch.n_texts if a.over_texts else batch.n_tokens
    unit = next_unit(me, 1)
    while unit < a.n_tiles:
        tile = advance(a.w, unit * a.n_cols * ROWS_PER_TILE)
        row = unit * ROWS_PER_TILE
        for t in range(0, n_rows, ROWS_AT_ONCE):
            p = _products(tile, advance(a.x, t * a.x_stride), a.x_stride, a.n_cols)
            _store(a, row, t, p[0], p[4])
            _store(a, row, t + 1, p[1], p[5])
            _store(a, row, t + 2, p[2], p[6])
            _store(a, row, t + 3, p[3], p[7])
        unit = next_unit(me, 1)


@inline
def _products(tile: Pointer, x: Pointer, stride: int, n_cols: int) -> Any:
    """8 rows of the tile times four rows of x, then its other 8 rows."""
    x1, x2, x3 = advance(x, stride), advance(x, 2 * stride), advance(x, 3 * stride)
    l0 = l1 = l2 = l3 = h0 = h1 = h2 = h3 = zero_f32()
    for c in range(n_cols):
        low = load_f32(tile, c * ROWS_PER_TILE)
        high = load_f32(tile, c * ROWS_PER_TILE + LANES)
        v = spread_f32(x[c])
        l0, h0 = fma(low, v, l0), fma(high, v, h0)
        v = spread_f32(x1[c])
        l1, h1 = fma(low, v, l1), fma(high, v, h1)
        v = spread_f32(x2[c])
        l2, h2 = fma(low, v, l2), fma(high, v, h2)
        v = spread_f32(x3[c])
        l3, h3 = fma(low, v, l3), fma(high, v, h3)
    return l0, l1, l2, l3, h0, h1, h2, h3


@inline
def _store(a: Operands, row: int, t: int, low: F32x8, high: F32x8) -> None:
    y = advance(a.y, t * a.y_stride)
    low, high = low + load_f32(a.bias, row), high + load_f32(a.bias, row + LANES)
    if a.add:
        low, high = load_f32(y, row) + low, load_f32(y, row + LANES) + high
    store_f32(y, row, low)
    store_f32(y, row + LANES, high)
