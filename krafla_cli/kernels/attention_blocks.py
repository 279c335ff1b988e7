"""The products of attention: a block of rows times 16 positions (scores) or 16 dimensions (sums of values).

A block is as many rows as the registers hold sums of: 8 with AVX-512, else 4. Each sum is one chain in ascending order,
so that both give the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels.features import AVX512
from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.operations import CHUNK, LANES
from krafla_cli.kernels.simd import fma, load_f32, spread_f32, store_f32, zero_f32
from krafla_cli.kernels.simd_types import F32x16, Pointer
from krafla_cli.kernels.simd_wide import first_half, load_f32x16, second_half, spread_f32x16

PAIR = 2 * LANES
BLOCK_ROWS = 8 if AVX512 else 4


@inline
def _chains_4(start: int, end: int, x: Pointer, stride: int, wide: Pointer) -> Any:
    """Σ x[r, i] · wide[i] over i ascending, x [4 rows, stride], wide [., 16]: first halves of 4 rows, second halves."""
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = zero_f32()
    for i in range(start, end):
        first = load_f32(wide, i * PAIR)
        second = load_f32(wide, i * PAIR + LANES)
        factor = spread_f32(x[i])
        s0 = fma(factor, first, s0)
        t0 = fma(factor, second, t0)
        factor = spread_f32(x[i + stride])
        s1 = fma(factor, first, s1)
        t1 = fma(factor, second, t1)
        factor = spread_f32(x[i + 2 * stride])
        s2 = fma(factor, first, s2)
        t2 = fma(factor, second, t2)
        factor = spread_f32(x[i + 3 * stride])
        s3 = fma(factor, first, s3)
        t3 = fma(factor, second, t3)
    return s0, s1, s2, s3, t0, t1, t2, t3


@inline
def _block_4(
    start: int, end: int, x: Pointer, stride: int, wide: Pointer, out: Pointer, first: int, second: int, row: int
) -> None:
    """Stores the first halves of rows at out[first + r · row], the second ones at out[second + r · row]."""
    s = _chains_4(start, end, x, stride, wide)
    store_f32(out, first, s[0])
    store_f32(out, second, s[4])
    store_f32(out, first + row, s[1])
    store_f32(out, second + row, s[5])
    store_f32(out, first + 2 * row, s[2])
    store_f32(out, second + 2 * row, s[6])
    store_f32(out, first + 3 * row, s[3])
    store_f32(out, second + 3 * row, s[7])


@inline
def _chains_8(start: int, end: int, x: Pointer, stride: int, wide: Pointer) -> Any:
    """As _chains_4 for 8 rows, whole rows of 16."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = spread_f32x16(np.float32(0))
    for i in range(start, end):
        v = load_f32x16(wide, i * PAIR)
        s0 = fma(spread_f32x16(x[i]), v, s0)
        s1 = fma(spread_f32x16(x[i + stride]), v, s1)
        s2 = fma(spread_f32x16(x[i + 2 * stride]), v, s2)
        s3 = fma(spread_f32x16(x[i + 3 * stride]), v, s3)
        s4 = fma(spread_f32x16(x[i + 4 * stride]), v, s4)
        s5 = fma(spread_f32x16(x[i + 5 * stride]), v, s5)
        s6 = fma(spread_f32x16(x[i + 6 * stride]), v, s6)
        s7 = fma(spread_f32x16(x[i + 7 * stride]), v, s7)
    return s0, s1, s2, s3, s4, s5, s6, s7


@inline
def _block_8(
    start: int, end: int, x: Pointer, stride: int, wide: Pointer, out: Pointer, first: int, second: int, row: int
) -> None:
    """As _block_4 for 8 rows."""
    s = _chains_8(start, end, x, stride, wide)
    _store_16(out, first, second, s[0])
    _store_16(out, first + row, second + row, s[1])
    _store_16(out, first + 2 * row, second + 2 * row, s[2])
    _store_16(out, first + 3 * row, second + 3 * row, s[3])
    _store_16(out, first + 4 * row, second + 4 * row, s[4])
    _store_16(out, first + 5 * row, second + 5 * row, s[5])
    _store_16(out, first + 6 * row, second + 6 * row, s[6])
    _store_16(out, first + 7 * row, second + 7 * row, s[7])


@inline
def _store_16(out: Pointer, first: int, second: int, x: F32x16) -> None:
    store_f32(out, first, first_half(x))
    store_f32(out, second, second_half(x))


_block = _block_8 if AVX512 else _block_4


@inline
def score_block(n: int, q: Pointer, keys: Pointer, scores: Pointer) -> None:
    """A block of rows of queries [rows, n] times 16 positions of keys [n, 16]."""
    _block(0, n, q, n, keys, scores, 0, LANES, CHUNK)


@inline
def sum_block(
    start: int, end: int, weights: Pointer, values: Pointer, out: Pointer, o: int, o_second: int, part: int
) -> None:
    """A block of rows of weights [rows, CHUNK] times 16 dimensions of values [CHUNK, 16], from ``start`` to ``end``."""
    _block(start, end, weights, CHUNK, values, out, o, o_second, part)
