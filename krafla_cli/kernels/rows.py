"""What the matrix-vector and the matrix-matrix kernels share: both work on 8 rows at a time, one row per lane.

Both compute, for row r and one position, the same float32 chain over the blocks b in ascending order

    y = fma(d[r, b], dx[b] · float32(sum of the block's 32 integer products), y)

whose integer sums are exact, so that their results have the same bits.
"""

from __future__ import annotations

from typing import Any

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.operations import LANES
from krafla_cli.kernels.simd import (
    advance,
    as_f16,
    as_f32,
    fma,
    load_f16,
    load_f32,
    spread_f32,
    store_f32,
    to_f32,
    transpose_f32,
)
from krafla_cli.kernels.simd_types import F32x8, I32x8, Operands, Pointer


@inline
def row_starts(first: int, n_rows: int, stride: int) -> Any:
    """Offsets of the 8 rows from ``first`` on; those after the last row repeat it."""
    last = n_rows - 1
    return (
        min(first, last) * stride,
        min(first + 1, last) * stride,
        min(first + 2, last) * stride,
        min(first + 3, last) * stride,
        min(first + 4, last) * stride,
        min(first + 5, last) * stride,
        min(first + 6, last) * stride,
        min(first + 7, last) * stride,
    )


@inline
def row_pointers(p: Pointer, first: int, n_rows: int, stride: int) -> Any:
    """Pointers to the 8 rows from ``first`` on; those after the last row repeat it."""
    s = row_starts(first, n_rows, stride)
    return (
        advance(p, s[0]),
        advance(p, s[1]),
        advance(p, s[2]),
        advance(p, s[3]),
        advance(p, s[4]),
        advance(p, s[5]),
        advance(p, s[6]),
        advance(p, s[7]),
    )


@inline
def _load_scales(d: Pointer, is_f16: int, i: int) -> F32x8:
    """8 scales as float32. (One at a time would make each conversion wait for the one before.)"""
    if is_f16:
        return load_f16(as_f16(d), i)
    return load_f32(as_f32(d), i)


@inline
def _copy_short_rows(a: Operands, first: int, pad: Pointer) -> None:
    """Fewer than 8 scales a row, copied to rows of 8, so that vector loads stay inside."""
    for lane in range(LANES):
        start = min(first + lane, a.n_rows - 1) * a.n_blocks
        for b in range(a.n_blocks):
            if a.is_f16:
                as_f16(pad)[lane * LANES + b] = as_f16(a.d)[start + b]
            else:
                as_f32(pad)[lane * LANES + b] = as_f32(a.d)[start + b]


@inline
def spread_scales(a: Operands, first: int, pad: Pointer, out: Pointer, width: int) -> None:
    """The scales of 8 rows, transposed: out[b · width + lane], float32 [max(n_blocks, 8), width]."""
    d = a.d
    n_blocks = a.n_blocks
    s = row_starts(first, a.n_rows, n_blocks)
    if n_blocks < LANES:
        _copy_short_rows(a, first, pad)
        d = pad
        n_blocks = LANES
        s = row_starts(0, LANES, LANES)
    for start in range(0, n_blocks, LANES):
        b = min(start, n_blocks - LANES)
        t = transpose_f32(
            _load_scales(d, a.is_f16, s[0] + b),
            _load_scales(d, a.is_f16, s[1] + b),
            _load_scales(d, a.is_f16, s[2] + b),
            _load_scales(d, a.is_f16, s[3] + b),
            _load_scales(d, a.is_f16, s[4] + b),
            _load_scales(d, a.is_f16, s[5] + b),
            _load_scales(d, a.is_f16, s[6] + b),
            _load_scales(d, a.is_f16, s[7] + b),
        )
        o = b * width
        store_f32(out, o, t[0])
        store_f32(out, o + width, t[1])
        store_f32(out, o + 2 * width, t[2])
        store_f32(out, o + 3 * width, t[3])
        store_f32(out, o + 4 * width, t[4])
        store_f32(out, o + 5 * width, t[5])
        store_f32(out, o + 6 * width, t[6])
        store_f32(out, o + 7 * width, t[7])


@inline
def add_block(total: F32x8, d: F32x8, block_sums: I32x8, dx: float) -> F32x8:
    """One block of the chain, for 8 rows."""
    return fma(d, to_f32(block_sums) * spread_f32(dx), total)


@inline
def store_rows(a: Operands, position: int, row: int, total: F32x8, pad: Pointer) -> None:
    """y[position, row : row + 8] is set to ``total`` or increased by it; rows after the last are left out."""
    y = advance(a.y, position * a.n_rows)
    if row + LANES <= a.n_rows:
        if a.add:
            store_f32(y, row, load_f32(y, row) + total)
        else:
            store_f32(y, row, total)
        return
    values = as_f32(pad)
    store_f32(values, 0, total)
    for lane in range(a.n_rows - row):
        if a.add:
            y[row + lane] = y[row + lane] + values[lane]
        else:
            y[row + lane] = values[lane]
