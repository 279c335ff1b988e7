"""Matrix-matrix products as in :mod:`~krafla_cli.kernels.matmul`, for processors with AVX-512 VNNI.

One instruction adds the products of four columns of 16 rows to 16 sums of 32 bits. It takes unsigned weights and signed
codes: nibbles as they are, and Q8_0 weights + 128; the sums start at -8 · Σ x or -128 · Σ x. A tile is 16 rows for both
encodings, and eight positions run over it together.
"""

from __future__ import annotations

from typing import Any

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.matmul import BLOCK_BYTES, position_pointers, run_tiles_of_16, unpack_q4_0, unpack_q8_0
from krafla_cli.kernels.operations import LANES
from krafla_cli.kernels.simd import advance, flip_high_bits, fma, store_i8, to_f32, zero_f32
from krafla_cli.kernels.simd_types import F32x16, Operands, Pointer
from krafla_cli.kernels.simd_wide import add_quads, load_f32x16, load_i8x64, spread_i32x16, store_f32x16, twice

_ROWS = 2 * LANES
_POSITIONS = 8
# The start of a sum from sx, -4 · Σ x.
_START_Q4_0 = 2
_START_Q8_0 = 32


def matmul_q4_0(a: Operands, step: Operands, me: Operands) -> None:
    """Operation MATMUL["q4_0"]."""
    run_tiles_of_16(a, step, me, unpack_q4_0, _run_tile_q4_0, _POSITIONS)


def matmul_q8_0(a: Operands, step: Operands, me: Operands) -> None:
    """Operation MATMUL["q8_0"]."""
    run_tiles_of_16(a, step, me, _unpack_q8_0, _run_tile_q8_0, _POSITIONS)


@inline
def _unpack_q8_0(a: Operands, row: int, first: int, end: int, tile: Pointer) -> None:
    """8 rows of blocks ``first`` to ``end``: per block and group of 4 columns, row 0 + 128, row 1 + 128, ..."""
    unpack_q8_0(a, row, first, end, tile, _store_unsigned)


@inline
def _store_unsigned(tile: Pointer, o: int, weights: Any) -> None:
    store_i8(tile, o, flip_high_bits(weights))


@inline
def _eight_positions(p: Pointer, position: int, stride: int) -> Any:
    return position_pointers(p, position, stride) + position_pointers(p, position + 4, stride)


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
def _run_tile_q4_0(
    a: Operands, position: int, first: int, end: int, tile: Pointer, scales: Pointer, sums: Pointer
) -> None:
    _run_tile(a, position, first, end, tile, scales, sums, _START_Q4_0)


@inline
def _run_tile_q8_0(
    a: Operands, position: int, first: int, end: int, tile: Pointer, scales: Pointer, sums: Pointer
) -> None:
    _run_tile(a, position, first, end, tile, scales, sums, _START_Q8_0)


@inline
def _run_tile(
    a: Operands, position: int, first: int, end: int, tile: Pointer, scales: Pointer, sums: Pointer, start: int
) -> None:
    """16 rows, eight positions, blocks ``first`` to ``end``: moves the float chains on in ``sums`` [8, 16]."""
    x = _eight_positions(a.x, position, a.n_blocks * 32)
    sx = _eight_positions(a.sx, position, a.n_blocks)
    dx = _eight_positions(a.dx, position, a.n_blocks)
    t0, t1, t2, t3, t4, t5, t6, t7 = _load_sums(sums, first > 0)
    for b in range(first, end):
        s = _block_sums(advance(tile, (b - first) * BLOCK_BYTES), x, 32 * b, _starts(sx, b, start))
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
