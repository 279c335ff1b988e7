"""Matrix-matrix products as in :mod:`~krafla_cli.kernels.matmul`, for processors with AVX-512 VNNI.

One instruction adds the products of four columns of 16 rows to 16 sums of 32 bits. It takes unsigned weights and signed
codes: nibbles as they are, and Q8_0 weights + 128; the sums start at -8 · Σ x or -128 · Σ x. A tile is 16 rows for both
encodings, and eight positions run over it together.
"""

from __future__ import annotations

from typing import Any

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.matmul import unpack_q4_0
from krafla_cli.kernels.operations import LANES, PAD_BYTES, TILE_BYTES
from krafla_cli.kernels.rows import row_pointers, spread_scales, store_rows
from krafla_cli.kernels.simd import (
    advance,
    as_f32,
    columns_of_32,
    flip_high_bits,
    fma,
    load_f32,
    load_i8,
    store_i8,
    to_f32,
    zero_f32,
)
from krafla_cli.kernels.simd_types import F32x16, Operands, Pointer
from krafla_cli.kernels.simd_wide import add_quads, load_f32x16, load_i8x64, spread_i32x16, store_f32x16, twice
from krafla_cli.kernels.threads import next_unit

_ROWS = 2 * LANES
_POSITIONS = 8
_BLOCK_BYTES = 512  # of an unpacked block: 8 groups of 4 columns x 16 rows
_TILE_BLOCKS = TILE_BYTES // _BLOCK_BYTES
# The start of a sum from sx, -4 · Σ x.
_START_Q4_0 = 2
_START_Q8_0 = 32


def matmul_q4_0(a: Operands, step: Operands, me: Operands) -> None:
    """Operation MATMUL["q4_0"]."""
    _matmul(a, step, me, unpack_q4_0, _START_Q4_0)


def matmul_q8_0(a: Operands, step: Operands, me: Operands) -> None:
    """Operation MATMUL["q8_0"]."""
    _matmul(a, step, me, _unpack_q8_0, _START_Q8_0)


@inline
def _matmul(a: Operands, step: Operands, me: Operands, unpack: Any, start: int) -> None:
    tile = advance(me.scratch, PAD_BYTES)
    scales = as_f32(advance(tile, TILE_BYTES))
    sums = advance(scales, _ROWS * max(a.n_blocks, LANES))
    n_tiles = (a.n_rows + _ROWS - 1) // _ROWS
    unit = next_unit(me, 1)
    while unit < n_tiles:
        row = unit * _ROWS
        spread_scales(a, row, me.scratch, scales, _ROWS)
        spread_scales(a, row + LANES, me.scratch, advance(scales, LANES), _ROWS)
        for first in range(0, a.n_blocks, _TILE_BLOCKS):
            end = min(first + _TILE_BLOCKS, a.n_blocks)
            unpack(a, row, first, end, tile)
            unpack(a, row + LANES, first, end, advance(tile, 32))
            for position in range(0, step.n_tokens, _POSITIONS):
                _run_tile(a, position, first, end, tile, scales, advance(sums, position * _ROWS), start)
        for position in range(step.n_tokens):
            store_rows(a, position, row, load_f32(sums, position * _ROWS), me.scratch)
            if row + LANES < a.n_rows:
                store_rows(a, position, row + LANES, load_f32(sums, position * _ROWS + LANES), me.scratch)
        unit = next_unit(me, 1)


@inline
def _unpack_q8_0(a: Operands, row: int, first: int, end: int, tile: Pointer) -> None:
    """8 rows of blocks ``first`` to ``end``: per block and group of 4 columns, row 0 + 128, row 1 + 128, ..."""
    rows = row_pointers(a.q, row, a.n_rows, a.n_blocks * 32)
    for b in range(first, end):
        i = b * 32
        g = columns_of_32(
            load_i8(rows[0], i),
            load_i8(rows[1], i),
            load_i8(rows[2], i),
            load_i8(rows[3], i),
            load_i8(rows[4], i),
            load_i8(rows[5], i),
            load_i8(rows[6], i),
            load_i8(rows[7], i),
        )
        o = (b - first) * _BLOCK_BYTES
        store_i8(tile, o, flip_high_bits(g[0]))
        store_i8(tile, o + 64, flip_high_bits(g[1]))
        store_i8(tile, o + 128, flip_high_bits(g[2]))
        store_i8(tile, o + 192, flip_high_bits(g[3]))
        store_i8(tile, o + 256, flip_high_bits(g[4]))
        store_i8(tile, o + 320, flip_high_bits(g[5]))
        store_i8(tile, o + 384, flip_high_bits(g[6]))
        store_i8(tile, o + 448, flip_high_bits(g[7]))


@inline
def _position_pointers(p: Pointer, position: int, stride: int) -> Any:
    """Pointers to eight positions."""
    return (
        advance(p, position * stride),
        advance(p, (position + 1) * stride),
        advance(p, (position + 2) * stride),
        advance(p, (position + 3) * stride),
        advance(p, (position + 4) * stride),
        advance(p, (position + 5) * stride),
        advance(p, (position + 6) * stride),
        advance(p, (position + 7) * stride),
    )


@inline
def _starts(sx: tuple[Pointer, ...], b: int, factor: int) -> Any:
    return (
        spread_i32x16(sx[0][b] * factor),
        spread_i32x16(sx[1][b] * factor),
        spread_i32x16(sx[2][b] * factor),
        spread_i32x16(sx[3][b] * factor),
        spread_i32x16(sx[4][b] * factor),
        spread_i32x16(sx[5][b] * factor),
        spread_i32x16(sx[6][b] * factor),
        spread_i32x16(sx[7][b] * factor),
    )


@inline
def _add_group(block: Pointer, x: tuple[Pointer, ...], i: int, g: int, s: Any) -> Any:
    """The sums after group ``g`` of 4 columns; a block's codes start at ``i``."""
    w = load_i8x64(block, 64 * g)
    i += 4 * g
    return (
        add_quads(s[0], w, x[0], i),
        add_quads(s[1], w, x[1], i),
        add_quads(s[2], w, x[2], i),
        add_quads(s[3], w, x[3], i),
        add_quads(s[4], w, x[4], i),
        add_quads(s[5], w, x[5], i),
        add_quads(s[6], w, x[6], i),
        add_quads(s[7], w, x[7], i),
    )


@inline
def _block_sums(block: Pointer, x: tuple[Pointer, ...], i: int, s: Any) -> Any:
    """An unpacked block times 32 codes of eight positions, from the starts ``s`` on: int32 [8][16 rows]."""
    s = _add_group(block, x, i, 0, s)
    s = _add_group(block, x, i, 1, s)
    s = _add_group(block, x, i, 2, s)
    s = _add_group(block, x, i, 3, s)
    s = _add_group(block, x, i, 4, s)
    s = _add_group(block, x, i, 5, s)
    s = _add_group(block, x, i, 6, s)
    return _add_group(block, x, i, 7, s)


@inline
def _add_block(total: F32x16, d: F32x16, block_sums: Any, dx: float) -> F32x16:
    """As rows.add_block, for 16 rows."""
    return fma(d, to_f32(block_sums) * dx, total)


@inline
def _load_sums(sums: Pointer, go_on: bool) -> Any:
    t0 = t1 = t2 = t3 = t4 = t5 = t6 = t7 = twice(zero_f32())
    if go_on:
        t0, t1 = load_f32x16(sums, 0), load_f32x16(sums, 16)
        t2, t3 = load_f32x16(sums, 32), load_f32x16(sums, 48)
        t4, t5 = load_f32x16(sums, 64), load_f32x16(sums, 80)
        t6, t7 = load_f32x16(sums, 96), load_f32x16(sums, 112)
    return t0, t1, t2, t3, t4, t5, t6, t7


@inline
def _run_tile(
    a: Operands, position: int, first: int, end: int, tile: Pointer, scales: Pointer, sums: Pointer, start: int
) -> None:
    """16 rows, eight positions, blocks ``first`` to ``end``: moves the float chains on in ``sums`` [8, 16]."""
    x = _position_pointers(a.x, position, a.n_blocks * 32)
    sx = _position_pointers(a.sx, position, a.n_blocks)
    dx = _position_pointers(a.dx, position, a.n_blocks)
    t0, t1, t2, t3, t4, t5, t6, t7 = _load_sums(sums, first > 0)
    for b in range(first, end):
        s = _block_sums(advance(tile, (b - first) * _BLOCK_BYTES), x, 32 * b, _starts(sx, b, start))
        d = load_f32x16(scales, b * _ROWS)
        t0, t1 = _add_block(t0, d, s[0], dx[0][b]), _add_block(t1, d, s[1], dx[1][b])
        t2, t3 = _add_block(t2, d, s[2], dx[2][b]), _add_block(t3, d, s[3], dx[3][b])
        t4, t5 = _add_block(t4, d, s[4], dx[4][b]), _add_block(t5, d, s[5], dx[5][b])
        t6, t7 = _add_block(t6, d, s[6], dx[6][b]), _add_block(t7, d, s[7], dx[7][b])
    store_f32x16(sums, 0, t0)
    store_f32x16(sums, 16, t1)
    store_f32x16(sums, 32, t2)
    store_f32x16(sums, 48, t3)
    store_f32x16(sums, 64, t4)
    store_f32x16(sums, 80, t5)
    store_f32x16(sums, 96, t6)
    store_f32x16(sums, 112, t7)
