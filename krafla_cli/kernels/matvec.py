"""Matrix-vector products: quantized weights as they lie in the file, one position of quantized activations.

At the speed of memory: 8 rows go side by side, so that their block sums become one vector, and what comes next is
prefetched across page boundaries, which the processor does not do by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.operations import LANES, PAD_BYTES
from krafla_cli.kernels.rows import add_block, row_pointers, spread_scales, store_rows
from krafla_cli.kernels.simd import (
    absolute_i8,
    advance,
    as_f32,
    dot_pairs,
    dot_pairs_i16,
    high_nibbles,
    load_f32,
    load_i8,
    load_two_rows,
    low_nibbles,
    prefetch,
    row_sums_i32,
    spread_i16,
    sums_of_8_rows,
    with_sign_of,
    zero_f32,
)
from krafla_cli.kernels.simd_types import F32x8, I8x32, I16x16, I32x8, Operands, Pointer
from krafla_cli.kernels.threads import next_unit

_LINE = 64
_PREFETCH_BYTES = 4096  # how far ahead, in whole tiles
_LONG_ROW_BYTES = 2304
# A piece of work: large enough that jumps from one to the next do not matter, and several for each thread, so that all
# end at the same time.
_PIECE_BYTES = 1 << 16
_PIECES = 4


def matvec_q4_0(a: Operands, step: Operands, me: Operands) -> None:
    """Operation MATVEC["q4_0"]."""
    run_tiles(a, me, a.n_blocks * 16, _total_q4_0)


def matvec_q8_0(a: Operands, step: Operands, me: Operands) -> None:
    """Operation MATVEC["q8_0"]."""
    run_tiles(a, me, a.n_blocks * 32, _total_q8_0)


@inline
def run_tiles(a: Operands, me: Operands, row_bytes: int, total_of_rows: Any) -> None:
    """Takes pieces of some tiles, each a step ahead, so that the end of one can prefetch the start of the next."""
    scales = as_f32(advance(me.scratch, PAD_BYTES))
    n_tiles = (a.n_rows + LANES - 1) // LANES
    tile_bytes = LANES * row_bytes
    distance = max(1, _PREFETCH_BYTES // tile_bytes)
    n_taken = max(1, min(_PIECE_BYTES // tile_bytes, n_tiles // (_PIECES * me.n_threads)))
    first = next_unit(me, n_taken)
    while first < n_tiles:
        next_first = next_unit(me, n_taken)
        end = min(first + n_taken, n_tiles)
        for tile in range(first, end):
            ahead = tile + distance
            if ahead >= end:
                ahead += next_first - end
            row = tile * LANES
            spread_scales(a, row, me.scratch, scales, LANES)
            store_rows(a, 0, row, total_of_rows(a, row, advance(a.q, ahead * tile_bytes), scales), me.scratch)
        first = next_first


@inline
def prefetch_lines(tile: Pointer, first: int, n: int, row_bytes: int) -> None:
    """Lines ``first`` to first + n of 8 rows, ``tile``: front to back, or long rows side by side as they are read."""
    if row_bytes < _LONG_ROW_BYTES:
        for i in range(first, first + n):
            prefetch(tile, i * _LINE)
    else:
        for i in range(first, first + n):
            prefetch(tile, i % LANES * row_bytes + i // LANES * _LINE)


@inline
def _total_q4_0(a: Operands, row: int, ahead: Pointer, scales: Pointer) -> F32x8:
    rows = row_pointers(a.q, row, a.n_rows, a.n_blocks * 16)
    x = a.x
    second_half = advance(x, 16)
    total = zero_f32()
    for b in range(a.n_blocks):
        prefetch_lines(ahead, 2 * b, 2, a.n_blocks * 16)
        low = load_two_rows(x, x, 32 * b)
        high = load_two_rows(second_half, second_half, 32 * b)
        sums = block_sums_q4_0(rows, 16 * b, low, high, spread_i16(a.sx[b]))
        total = add_block(total, load_f32(scales, b * LANES), sums, a.dx[b])
    return total


@inline
def block_sums_q4_0(rows: tuple[Pointer, ...], i: int, low: I8x32, high: I8x32, start: I16x16) -> I32x8:
    """Σ (nibble - 8) · x of 8 rows: nibbles are unsigned, and ``start`` is half of -8 · Σ x."""
    return sums_of_8_rows(
        _products_q4_0(load_two_rows(rows[0], rows[4], i), low, high),
        _products_q4_0(load_two_rows(rows[1], rows[5], i), low, high),
        _products_q4_0(load_two_rows(rows[2], rows[6], i), low, high),
        _products_q4_0(load_two_rows(rows[3], rows[7], i), low, high),
        start,
    )


@inline
def _products_q4_0(w: I8x32, low: I8x32, high: I8x32) -> I16x16:
    """Two rows of nibbles, one in each half: low ones times x[0:16], high ones times x[16:32], added by fours."""
    return dot_pairs(low_nibbles(w), low) + dot_pairs(high_nibbles(w), high)


@inline
def _total_q8_0(a: Operands, row: int, ahead: Pointer, scales: Pointer) -> F32x8:
    rows = row_pointers(a.q, row, a.n_rows, a.n_blocks * 32)
    total = zero_f32()
    for b in range(a.n_blocks):
        prefetch_lines(ahead, 4 * b, 4, a.n_blocks * 32)
        x = load_i8(a.x, 32 * b)
        sums = _block_sums_q8_0(rows, 32 * b, x, absolute_i8(x))
        total = add_block(total, load_f32(scales, b * LANES), sums, a.dx[b])
    return total


@inline
def _block_sums_q8_0(rows: tuple[Pointer, ...], i: int, x: I8x32, magnitude: I8x32) -> I32x8:
    return row_sums_i32(
        _products_q8_0(load_i8(rows[0], i), x, magnitude),
        _products_q8_0(load_i8(rows[1], i), x, magnitude),
        _products_q8_0(load_i8(rows[2], i), x, magnitude),
        _products_q8_0(load_i8(rows[3], i), x, magnitude),
        _products_q8_0(load_i8(rows[4], i), x, magnitude),
        _products_q8_0(load_i8(rows[5], i), x, magnitude),
        _products_q8_0(load_i8(rows[6], i), x, magnitude),
        _products_q8_0(load_i8(rows[7], i), x, magnitude),
    )


@inline
def _products_q8_0(w: I8x32, x: I8x32, magnitude: I8x32) -> I32x8:
    """w · x as |x| · (w with the sign of x), added by fours: two products fit 16 bits, since w is never -128."""
    return dot_pairs_i16(dot_pairs(magnitude, with_sign_of(w, x)), spread_i16(np.int16(1)))
