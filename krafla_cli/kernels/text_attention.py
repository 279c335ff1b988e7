"""Attention within short texts, all of a text at once: keys transposed, then 8 queries by 8 keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels.functions import exp_of_negative
from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import (
    advance,
    as_f32,
    fma,
    lane_numbers,
    load_f32,
    max_f32,
    maximum,
    select,
    spread_f32,
    store_f32,
    sum_f32,
    zero_f32,
)
from krafla_cli.kernels.simd_types import Operands, Pointer
from krafla_cli.kernels.text_operations import LANES
from krafla_cli.kernels.threads import next_unit

_NEGATIVE = np.float32(-3e38)  # the score of a key that is not there


def attend_texts(a: Operands, batch: Operands, me: Operands) -> None:
    """Operation ATTEND. A thread takes one head of one text."""
    unit = next_unit(me, 1)
    while unit < batch.n_texts * a.n_heads:
        text = unit // a.n_heads
        start = batch.starts[text]
        n = batch.starts[text + 1] - start
        _attend_head(a, advance(a.qkv, start * 3 * a.stride), start, n, unit % a.n_heads, as_f32(me.scratch))
        unit = next_unit(me, 1)


@inline
def _attend_head(a: Operands, qkv: Pointer, start: int, n: int, head: int, scratch: Pointer) -> None:
    row = 3 * a.stride
    queries = advance(qkv, head * a.head_dim)
    n_keys = (n + LANES - 1) // LANES * LANES
    keys = scratch  # [head_dim, n_keys]
    scores = advance(keys, a.head_dim * n_keys)  # [8, n_keys]
    result = advance(scores, LANES * n_keys)
    _transpose_keys(advance(queries, a.stride), n, row, a.head_dim, n_keys, keys)
    for first in range(0, n, LANES):
        for key in range(0, n_keys, LANES):
            _scores(queries, first, n - 1, row, advance(keys, key), n_keys, a.head_dim, advance(scores, key))
        for i in range(first, min(first + LANES, n)):
            weights = advance(scores, (i - first) * n_keys)
            share = _softmax(weights, n, n_keys, a.scale)
            _mix(advance(queries, 2 * a.stride), n, row, a.head_dim, weights, share, result)
            out = advance(a.out, (start + i) * a.stride + head * a.head_dim)
            _copy(result, out, a.head_dim)


@inline
def _transpose_keys(source: Pointer, n: int, row: int, head_dim: int, n_keys: int, keys: Pointer) -> None:
    """Keys of ``n`` tokens to [head_dim, n_keys], zero behind them."""
    for j in range(n):
        for d in range(head_dim):
            keys[d * n_keys + j] = source[j * row + d]
    for j in range(n, n_keys):
        for d in range(head_dim):
            keys[d * n_keys + j] = 0


@inline
def _scores(
    queries: Pointer, first: int, last: int, row: int, keys: Pointer, n_keys: int, head_dim: int, out: Pointer
) -> None:
    """Queries ``first`` to first + 8 (those after ``last`` repeat it) times 8 keys: out [8, n_keys]."""
    q0 = advance(queries, first * row)
    q1 = advance(queries, min(first + 1, last) * row)
    q2 = advance(queries, min(first + 2, last) * row)
    q3 = advance(queries, min(first + 3, last) * row)
    q4 = advance(queries, min(first + 4, last) * row)
    q5 = advance(queries, min(first + 5, last) * row)
    q6 = advance(queries, min(first + 6, last) * row)
    q7 = advance(queries, min(first + 7, last) * row)
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = zero_f32()
    for d in range(head_dim):
        k = load_f32(keys, d * n_keys)
        s0 = fma(k, spread_f32(q0[d]), s0)
        s1 = fma(k, spread_f32(q1[d]), s1)
        s2 = fma(k, spread_f32(q2[d]), s2)
        s3 = fma(k, spread_f32(q3[d]), s3)
        s4 = fma(k, spread_f32(q4[d]), s4)
        s5 = fma(k, spread_f32(q5[d]), s5)
        s6 = fma(k, spread_f32(q6[d]), s6)
        s7 = fma(k, spread_f32(q7[d]), s7)
    store_f32(out, 0, s0)
    store_f32(out, n_keys, s1)
    store_f32(out, 2 * n_keys, s2)
    store_f32(out, 3 * n_keys, s3)
    store_f32(out, 4 * n_keys, s4)
    store_f32(out, 5 * n_keys, s5)
    store_f32(out, 6 * n_keys, s6)
    store_f32(out, 7 * n_keys, s7)


@inline
def _softmax(scores: Pointer, n: int, n_keys: int, scale: float) -> float:
    """exp(scale · score - largest) in place; returns 1 / their sum, NaN where a score is not finite."""
    factor = np.float32(scale)
    largest = spread_f32(_NEGATIVE)
    nothing = zero_f32()
    last = n_keys - LANES
    for i in range(0, n_keys, LANES):
        s = load_f32(scores, i) * factor
        nothing = fma(s, zero_f32(), nothing)  # NaN once a score is NaN or infinite
        if i == last:
            s = select(lane_numbers() < np.float32(n - last), s, spread_f32(_NEGATIVE))
        store_f32(scores, i, s)
        largest = maximum(largest, s)
    top = max_f32(largest)
    total = zero_f32()
    for i in range(0, n_keys, LANES):
        e = exp_of_negative(load_f32(scores, i) - top)
        store_f32(scores, i, e)
        total = total + e
    return np.float32(1) / (sum_f32(total) + sum_f32(nothing))


@inline
def _mix(values: Pointer, n: int, row: int, head_dim: int, weights: Pointer, share: float, out: Pointer) -> None:
    """share · Σ weight · value over the tokens, 32, then 8 dimensions at a time; writes whole vectors."""
    n_32 = head_dim // 32 * 32
    for d in range(0, n_32, 32):
        s0 = s1 = s2 = s3 = zero_f32()
        for j in range(n):
            w = spread_f32(weights[j])
            v = advance(values, j * row + d)
            s0 = fma(w, load_f32(v, 0), s0)
            s1 = fma(w, load_f32(v, 8), s1)
            s2 = fma(w, load_f32(v, 16), s2)
            s3 = fma(w, load_f32(v, 24), s3)
        store_f32(out, d, s0 * share)
        store_f32(out, d + 8, s1 * share)
        store_f32(out, d + 16, s2 * share)
        store_f32(out, d + 24, s3 * share)
    for d in range(n_32, head_dim, LANES):
        s: Any = zero_f32()
        for j in range(n):
            s = fma(spread_f32(weights[j]), load_f32(values, j * row + d), s)
        store_f32(out, d, s * share)


@inline
def _copy(source: Pointer, target: Pointer, n: int) -> None:
    n_8 = n // LANES * LANES
    for i in range(0, n_8, LANES):
        store_f32(target, i, load_f32(source, i))
    for i in range(n_8, n):
        target[i] = source[i]
