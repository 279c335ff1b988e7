"""The products of attention: a block of rows times 16 positions (scores) or 16 dimensions (sums of values).

A block is as many rows as the registers hold sums of: 8 with AVX-512, else 4. Each sum is one chain in ascending order,
so that both give the same bits.
"""

from __future__ import annotations

import numpy as np

from krafla_cli.kernels.features import AVX512
from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.operations import CHUNK, LANES
from krafla_cli.kernels.simd import fma, load_f32, spread_f32, store_f32, zero_f32
from krafla_cli.kernels.simd_types import F32x16, Pointer
from krafla_cli.kernels.simd_wide import first_half, load_f32x16, second_half, spread_f32x16, store_f32x16

PAIR = 2 * LANES
BLOCK_ROWS = 8 if AVX512 else 4


@inline
def _score_4(n: int, q: Pointer, keys: Pointer, scores: Pointer) -> None:
    """4 rows, 16 positions."""
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = zero_f32()
    for d in range(n):
        first = load_f32(keys, d * PAIR)
        second = load_f32(keys, d * PAIR + LANES)
        x = spread_f32(q[d])
        s0 = fma(x, first, s0)
        t0 = fma(x, second, t0)
        x = spread_f32(q[d + n])
        s1 = fma(x, first, s1)
        t1 = fma(x, second, t1)
        x = spread_f32(q[d + 2 * n])
        s2 = fma(x, first, s2)
        t2 = fma(x, second, t2)
        x = spread_f32(q[d + 3 * n])
        s3 = fma(x, first, s3)
        t3 = fma(x, second, t3)
    store_f32(scores, 0, s0)
    store_f32(scores, LANES, t0)
    store_f32(scores, CHUNK, s1)
    store_f32(scores, CHUNK + LANES, t1)
    store_f32(scores, 2 * CHUNK, s2)
    store_f32(scores, 2 * CHUNK + LANES, t2)
    store_f32(scores, 3 * CHUNK, s3)
    store_f32(scores, 3 * CHUNK + LANES, t3)


@inline
def _score_8(n: int, q: Pointer, keys: Pointer, scores: Pointer) -> None:
    """8 rows, 16 positions."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = spread_f32x16(np.float32(0))
    for d in range(n):
        key = load_f32x16(keys, d * PAIR)
        s0 = fma(spread_f32x16(q[d]), key, s0)
        s1 = fma(spread_f32x16(q[d + n]), key, s1)
        s2 = fma(spread_f32x16(q[d + 2 * n]), key, s2)
        s3 = fma(spread_f32x16(q[d + 3 * n]), key, s3)
        s4 = fma(spread_f32x16(q[d + 4 * n]), key, s4)
        s5 = fma(spread_f32x16(q[d + 5 * n]), key, s5)
        s6 = fma(spread_f32x16(q[d + 6 * n]), key, s6)
        s7 = fma(spread_f32x16(q[d + 7 * n]), key, s7)
    store_f32x16(scores, 0, s0)
    store_f32x16(scores, CHUNK, s1)
    store_f32x16(scores, 2 * CHUNK, s2)
    store_f32x16(scores, 3 * CHUNK, s3)
    store_f32x16(scores, 4 * CHUNK, s4)
    store_f32x16(scores, 5 * CHUNK, s5)
    store_f32x16(scores, 6 * CHUNK, s6)
    store_f32x16(scores, 7 * CHUNK, s7)


score_block = _score_8 if AVX512 else _score_4


@inline
def _sum_4(
    start: int, end: int, weights: Pointer, values: Pointer, out: Pointer, o: int, o_second: int, part: int
) -> None:
    """4 rows, 16 dimensions."""
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = zero_f32()
    for i in range(start, end):
        first = load_f32(values, i * PAIR)
        second = load_f32(values, i * PAIR + LANES)
        w = spread_f32(weights[i])
        s0 = fma(w, first, s0)
        t0 = fma(w, second, t0)
        w = spread_f32(weights[i + CHUNK])
        s1 = fma(w, first, s1)
        t1 = fma(w, second, t1)
        w = spread_f32(weights[i + 2 * CHUNK])
        s2 = fma(w, first, s2)
        t2 = fma(w, second, t2)
        w = spread_f32(weights[i + 3 * CHUNK])
        s3 = fma(w, first, s3)
        t3 = fma(w, second, t3)
    store_f32(out, o, s0)
    store_f32(out, o_second, t0)
    store_f32(out, o + part, s1)
    store_f32(out, o_second + part, t1)
    store_f32(out, o + 2 * part, s2)
    store_f32(out, o_second + 2 * part, t2)
    store_f32(out, o + 3 * part, s3)
    store_f32(out, o_second + 3 * part, t3)


@inline
def _sum_8(
    start: int, end: int, weights: Pointer, values: Pointer, out: Pointer, o: int, o_second: int, part: int
) -> None:
    """8 rows, 16 dimensions."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = spread_f32x16(np.float32(0))
    for i in range(start, end):
        value = load_f32x16(values, i * PAIR)
        s0 = fma(spread_f32x16(weights[i]), value, s0)
        s1 = fma(spread_f32x16(weights[i + CHUNK]), value, s1)
        s2 = fma(spread_f32x16(weights[i + 2 * CHUNK]), value, s2)
        s3 = fma(spread_f32x16(weights[i + 3 * CHUNK]), value, s3)
        s4 = fma(spread_f32x16(weights[i + 4 * CHUNK]), value, s4)
        s5 = fma(spread_f32x16(weights[i + 5 * CHUNK]), value, s5)
        s6 = fma(spread_f32x16(weights[i + 6 * CHUNK]), value, s6)
        s7 = fma(spread_f32x16(weights[i + 7 * CHUNK]), value, s7)
    _store_16(out, o, o_second, s0)
    _store_16(out, o + part, o_second + part, s1)
    _store_16(out, o + 2 * part, o_second + 2 * part, s2)
    _store_16(out, o + 3 * part, o_second + 3 * part, s3)
    _store_16(out, o + 4 * part, o_second + 4 * part, s4)
    _store_16(out, o + 5 * part, o_second + 5 * part, s5)
    _store_16(out, o + 6 * part, o_second + 6 * part, s6)
    _store_16(out, o + 7 * part, o_second + 7 * part, s7)


@inline
def _store_16(out: Pointer, first: int, second: int, x: F32x16) -> None:
    store_f32(out, first, first_half(x))
    store_f32(out, second, second_half(x))


sum_block = _sum_8 if AVX512 else _sum_4
