"""Matrix-matrix products: quantized weights times the quantized activations of several positions.

A thread takes a tile of rows, unpacks it into a piece of scratch memory that stays in the first-level cache (up to
32 blocks of columns at a time, in the order in which they are read), and runs all positions over it, four at a time.

Both encodings run through the same inner loop of unsigned 4-bit weights: two vectors of them, each 8 rows x 4 columns,
times four positions. For Q4_0 the two vectors are 16 rows; for Q8_0 they are the low and the high nibbles of 8 rows:
w = low + 16 · (high - 8). Eight products of 4 bits x 8 bits per lane fit 16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.operations import LANES, PAD_BYTES, TILE_BYTES
from krafla_cli.kernels.rows import add_block, row_pointers, spread_scales, store_rows
from krafla_cli.kernels.simd import (
    advance,
    as_f32,
    columns_of_16,
    columns_of_32,
    dot_pairs,
    dot_pairs_i16,
    flip_high_bits,
    high_nibbles,
    in_place,
    load_4_bytes,
    load_f32,
    load_i8,
    load_i8x16,
    low_nibbles,
    spread_i16,
    store_f32,
    store_i8,
    zero_f32,
    zero_i16,
)
from krafla_cli.kernels.simd_types import F32x8, I16x16, I32x8, Operands, Pointer
from krafla_cli.kernels.threads import next_unit

BLOCK_BYTES = 512  # of an unpacked block: 8 groups of 4 columns x two vectors
_TILE_BLOCKS = TILE_BYTES // BLOCK_BYTES
_POSITIONS = 4  # that run over a tile together


def matmul_q4_0(a: Operands, step: Operands, me: Operands) -> None:
    """Operation MATMUL["q4_0"]."""
    run_tiles_of_16(a, step, me, unpack_q4_0, _run_tile_q4_0, _POSITIONS)


@inline
def run_tiles_of_16(a: Operands, step: Operands, me: Operands, unpack: Any, run_tile: Any, n_positions: int) -> None:
    """Tiles of 16 rows: ``unpack`` takes 8 rows at a time, ``run_tile`` runs ``n_positions`` over an unpacked piece."""
    tile = advance(me.scratch, PAD_BYTES)
    scales = as_f32(advance(tile, TILE_BYTES))
    sums = advance(scales, 2 * LANES * max(a.n_blocks, LANES))
    n_tiles = (a.n_rows + 2 * LANES - 1) // (2 * LANES)
    unit = next_unit(me, 1)
    while unit < n_tiles:
        row = unit * 2 * LANES
        spread_scales(a, row, me.scratch, scales, 2 * LANES)
        spread_scales(a, row + LANES, me.scratch, advance(scales, LANES), 2 * LANES)
        for first in range(0, a.n_blocks, _TILE_BLOCKS):
            end = min(first + _TILE_BLOCKS, a.n_blocks)
            unpack(a, row, first, end, tile)
            unpack(a, row + LANES, first, end, advance(tile, 32))
            for position in range(0, step.n_tokens, n_positions):
                run_tile(a, position, first, end, tile, scales, advance(sums, position * 2 * LANES))
        for position in range(step.n_tokens):
            store_rows(a, position, row, load_f32(sums, position * 2 * LANES), me.scratch)
            if row + LANES < a.n_rows:
                store_rows(a, position, row + LANES, load_f32(sums, (position * 2 + 1) * LANES), me.scratch)
        unit = next_unit(me, 1)


def matmul_q8_0(a: Operands, step: Operands, me: Operands) -> None:
    """Operation MATMUL["q8_0"]."""
    tile = advance(me.scratch, PAD_BYTES)
    scales = as_f32(advance(tile, TILE_BYTES))
    sums = advance(scales, LANES * max(a.n_blocks, LANES))
    n_tiles = (a.n_rows + LANES - 1) // LANES
    unit = next_unit(me, 1)
    while unit < n_tiles:
        row = unit * LANES
        spread_scales(a, row, me.scratch, scales, LANES)
        for first in range(0, a.n_blocks, _TILE_BLOCKS):
            end = min(first + _TILE_BLOCKS, a.n_blocks)
            unpack_q8_0(a, row, first, end, tile, _store_q8_0)
            for position in range(0, step.n_tokens, _POSITIONS):
                _run_tile_q8_0(a, position, first, end, tile, scales, advance(sums, position * LANES))
        for position in range(step.n_tokens):
            store_rows(a, position, row, load_f32(sums, position * LANES), me.scratch)
        unit = next_unit(me, 1)


@inline
def unpack_q4_0(a: Operands, row: int, first: int, end: int, tile: Pointer) -> None:
    """8 rows of blocks ``first`` to ``end``: per block and group of 4 columns, the nibbles of row 0, of row 1, ..."""
    rows = row_pointers(a.q, row, a.n_rows, a.n_blocks * 16)
    for b in range(first, end):
        i = b * 16
        o = (b - first) * BLOCK_BYTES
        g = columns_of_16(
            load_i8x16(rows[0], i),
            load_i8x16(rows[1], i),
            load_i8x16(rows[2], i),
            load_i8x16(rows[3], i),
            load_i8x16(rows[4], i),
            load_i8x16(rows[5], i),
            load_i8x16(rows[6], i),
            load_i8x16(rows[7], i),
        )
        store_i8(tile, o, low_nibbles(g[0]))
        store_i8(tile, o + 64, low_nibbles(g[1]))
        store_i8(tile, o + 128, low_nibbles(g[2]))
        store_i8(tile, o + 192, low_nibbles(g[3]))
        store_i8(tile, o + 256, high_nibbles(g[0]))
        store_i8(tile, o + 320, high_nibbles(g[1]))
        store_i8(tile, o + 384, high_nibbles(g[2]))
        store_i8(tile, o + 448, high_nibbles(g[3]))


@inline
def unpack_q8_0(a: Operands, row: int, first: int, end: int, tile: Pointer, store: Any) -> None:
    """8 rows of blocks ``first`` to ``end``: ``store`` gets each group of 4 columns, and where in ``tile`` it goes."""
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
        o = (b - first) * BLOCK_BYTES
        store(tile, o, g[0])
        store(tile, o + 64, g[1])
        store(tile, o + 128, g[2])
        store(tile, o + 192, g[3])
        store(tile, o + 256, g[4])
        store(tile, o + 320, g[5])
        store(tile, o + 384, g[6])
        store(tile, o + 448, g[7])


@inline
def _store_q8_0(tile: Pointer, o: int, weights: Any) -> None:
    """Low nibbles, then high ones + 8."""
    store_i8(tile, o, low_nibbles(weights))
    store_i8(tile, o + 32, high_nibbles(flip_high_bits(weights)))


@inline
def _block_products(tile: Pointer, x: tuple[Pointer, ...], low: Any, high: Any) -> Any:
    """An unpacked block times 32 codes of four positions: 8 running sums.

    Four of the first vector, from the four starts ``low``, then four of the second, from ``high``.
    """
    s = _add_group(tile, x, 0, (low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]))
    s = _add_group(tile, x, 1, s)
    s = _add_group(tile, x, 2, s)
    s = _add_group(tile, x, 3, s)
    s = _add_group(tile, x, 4, s)
    s = _add_group(tile, x, 5, s)
    s = _add_group(tile, x, 6, s)
    return _add_group(tile, x, 7, s)


@inline
def _add_group(tile: Pointer, x: tuple[Pointer, ...], g: int, s: Any) -> Any:
    """The running sums after group ``g`` of 4 columns."""
    first = load_i8(tile, 64 * g)
    second = load_i8(tile, 64 * g + 32)
    x0 = load_4_bytes(x[0], 4 * g)
    l0 = in_place(s[0] + dot_pairs(first, x0))
    h0 = in_place(s[4] + dot_pairs(second, x0))
    x1 = load_4_bytes(x[1], 4 * g)
    l1 = in_place(s[1] + dot_pairs(first, x1))
    h1 = in_place(s[5] + dot_pairs(second, x1))
    x2 = load_4_bytes(x[2], 4 * g)
    l2 = in_place(s[2] + dot_pairs(first, x2))
    h2 = in_place(s[6] + dot_pairs(second, x2))
    x3 = load_4_bytes(x[3], 4 * g)
    l3 = in_place(s[3] + dot_pairs(first, x3))
    h3 = in_place(s[7] + dot_pairs(second, x3))
    return l0, l1, l2, l3, h0, h1, h2, h3


@inline
def position_pointers(p: Pointer, position: int, stride: int) -> Any:
    """Pointers to four positions."""
    return (
        advance(p, position * stride),
        advance(p, (position + 1) * stride),
        advance(p, (position + 2) * stride),
        advance(p, (position + 3) * stride),
    )


@inline
def _starts(sx: tuple[Pointer, ...], b: int) -> tuple[I16x16, I16x16, I16x16, I16x16]:
    """-4 · Σ x of four positions: in two 16-bit sums a lane that makes -8 · Σ x."""
    return spread_i16(sx[0][b]), spread_i16(sx[1][b]), spread_i16(sx[2][b]), spread_i16(sx[3][b])


@inline
def _block_pointers(x: tuple[Pointer, ...], b: int) -> Any:
    return advance(x[0], 32 * b), advance(x[1], 32 * b), advance(x[2], 32 * b), advance(x[3], 32 * b)


@inline
def _lane_sums(s: I16x16) -> I32x8:
    return dot_pairs_i16(s, spread_i16(np.int16(1)))


@inline
def _nibble_sums(low: I16x16, high: I16x16) -> I32x8:
    """low + 16 · high of each lane."""
    return _lane_sums(low) + dot_pairs_i16(high, spread_i16(np.int16(16)))


@inline
def _run_tile_q4_0(
    a: Operands, position: int, first: int, end: int, tile: Pointer, scales: Pointer, sums: Pointer
) -> None:
    """16 rows, four positions, blocks ``first`` to ``end``: moves the float chains on in ``sums`` [4, 16]."""
    x = position_pointers(a.x, position, a.n_blocks * 32)
    sx = position_pointers(a.sx, position, a.n_blocks)
    dx = position_pointers(a.dx, position, a.n_blocks)
    t0, t1, t2, t3, u0, u1, u2, u3 = _load_sums_16(sums, first > 0)
    for b in range(first, end):
        start = _starts(sx, b)
        s = _block_products(advance(tile, (b - first) * BLOCK_BYTES), _block_pointers(x, b), start, start)
        d = load_f32(scales, b * 2 * LANES)
        t0 = add_block(t0, d, _lane_sums(s[0]), dx[0][b])
        t1 = add_block(t1, d, _lane_sums(s[1]), dx[1][b])
        t2 = add_block(t2, d, _lane_sums(s[2]), dx[2][b])
        t3 = add_block(t3, d, _lane_sums(s[3]), dx[3][b])
        d = load_f32(scales, b * 2 * LANES + LANES)
        u0 = add_block(u0, d, _lane_sums(s[4]), dx[0][b])
        u1 = add_block(u1, d, _lane_sums(s[5]), dx[1][b])
        u2 = add_block(u2, d, _lane_sums(s[6]), dx[2][b])
        u3 = add_block(u3, d, _lane_sums(s[7]), dx[3][b])
    store_f32(sums, 0, t0)
    store_f32(sums, 8, u0)
    store_f32(sums, 16, t1)
    store_f32(sums, 24, u1)
    store_f32(sums, 32, t2)
    store_f32(sums, 40, u2)
    store_f32(sums, 48, t3)
    store_f32(sums, 56, u3)


@inline
def _load_sums_16(sums: Pointer, go_on: bool) -> tuple[F32x8, ...]:
    t0 = t1 = t2 = t3 = u0 = u1 = u2 = u3 = zero_f32()
    if go_on:
        t0, u0 = load_f32(sums, 0), load_f32(sums, 8)
        t1, u1 = load_f32(sums, 16), load_f32(sums, 24)
        t2, u2 = load_f32(sums, 32), load_f32(sums, 40)
        t3, u3 = load_f32(sums, 48), load_f32(sums, 56)
    return t0, t1, t2, t3, u0, u1, u2, u3


@inline
def _run_tile_q8_0(
    a: Operands, position: int, first: int, end: int, tile: Pointer, scales: Pointer, sums: Pointer
) -> None:
    """8 rows, four positions, blocks ``first`` to ``end``: moves the float chains on in ``sums`` [4, 8]."""
    x = position_pointers(a.x, position, a.n_blocks * 32)
    sx = position_pointers(a.sx, position, a.n_blocks)
    dx = position_pointers(a.dx, position, a.n_blocks)
    t0 = t1 = t2 = t3 = zero_f32()
    zero = zero_i16()
    if first > 0:
        t0, t1, t2, t3 = load_f32(sums, 0), load_f32(sums, 8), load_f32(sums, 16), load_f32(sums, 24)
    for b in range(first, end):
        block = advance(tile, (b - first) * BLOCK_BYTES)
        s = _block_products(block, _block_pointers(x, b), (zero, zero, zero, zero), _starts(sx, b))
        d = load_f32(scales, b * LANES)
        t0 = add_block(t0, d, _nibble_sums(s[0], s[4]), dx[0][b])
        t1 = add_block(t1, d, _nibble_sums(s[1], s[5]), dx[1][b])
        t2 = add_block(t2, d, _nibble_sums(s[2], s[6]), dx[2][b])
        t3 = add_block(t3, d, _nibble_sums(s[3], s[7]), dx[3][b])
    store_f32(sums, 0, t0)
    store_f32(sums, 8, t1)
    store_f32(sums, 16, t2)
    store_f32(sums, 24, t3)
