"""Attention over the cache in chunks of 256 fixed positions, with a softmax that merges chunks in ascending order.

A row is one query head of one position. For a row and a chunk, attention gives a part of three: the largest score m,
the sum l of exp(score - m), and the sum o of exp(score - m) · value. Parts of ascending chunks are merged in one way
only, so that a row's result depends neither on the other rows of its step nor on which thread did which chunk.

Rows of one KV head go together, so that a key or value is read, and widened from f16, once for all of them. Positions
are the lanes of scores, dimensions those of values; see heads.py for the layout of the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels.attention_blocks import BLOCK_ROWS, PAIR, score_block, sum_block
from krafla_cli.kernels.functions import exp, exp_of_negative, soft_cap
from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.operations import ATTENTION_ROWS, CHUNK, LANES
from krafla_cli.kernels.simd import (
    advance,
    as_f16,
    as_f32,
    fma,
    lane_numbers,
    load_f16,
    load_f32,
    max_f32,
    maximum,
    select,
    spread_f32,
    store_f32,
    sum_f32,
    zero_f32,
)
from krafla_cli.kernels.simd_types import F32x8, Operands, Pointer
from krafla_cli.kernels.threads import next_unit

_NONE = np.float32(-np.inf)


@inline
def _load_half(cache: Pointer, i: int) -> F32x8:
    return load_f16(as_f16(cache), i)


@inline
def _load_float(cache: Pointer, i: int) -> F32x8:
    return load_f32(as_f32(cache), i)


def attend_f16(a: Operands, step: Operands, me: Operands) -> None:
    """Operation ATTEND["f16"]."""
    _attend(a, step, me, _load_half)


def attend_f32(a: Operands, step: Operands, me: Operands) -> None:
    """Operation ATTEND["f32"]."""
    _attend(a, step, me, _load_float)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes. A part is m, l, six floats of padding, and o.


@inline
def _padded(head_dim: int) -> int:
    return (head_dim + LANES - 1) // LANES * LANES


@inline
def _part_floats(a: Operands) -> int:
    return LANES + _padded(a.head_dim)


@inline
def _group(a: Operands) -> int:
    """Query heads of a KV head: rows of one position."""
    return a.n_heads // a.n_kv_heads


@inline
def _first_position(a: Operands, position: int) -> int:
    """The first position that ``position`` attends to."""
    return max(0, position - a.window + 1) if a.window else 0


@inline
def _chunk_start(a: Operands, position: int) -> int:
    """The first chunk that ``position`` attends to."""
    return _first_position(a, position) // CHUNK


@inline
def _chunk_end(position: int) -> int:
    """The chunk after the last one that ``position`` attends to."""
    return position // CHUNK + 1


# ---------------------------------------------------------------------------------------------------------------------
# The way through the work


@inline
def _attend(a: Operands, step: Operands, me: Operands, load: Any) -> None:
    """A unit is some rows of a KV head, with all their chunks; the last rows, which take longest, go first.

    Where the step is one position, a unit is one chunk, so that there is work for all threads.
    """
    queries = as_f32(me.scratch)
    totals = advance(queries, ATTENTION_ROWS * a.head_dim)
    rest = advance(totals, ATTENTION_ROWS * _part_floats(a))
    is_split = step.n_tokens == 1
    n_rows = step.n_tokens * _group(a)
    n_blocks = (n_rows + ATTENTION_ROWS - 1) // ATTENTION_ROWS
    n_splits = _chunk_end(step.position) - _chunk_start(a, step.position) if is_split else 1
    unit = next_unit(me, 1)
    while unit < n_splits * n_blocks * a.n_kv_heads:
        split = unit % n_splits
        kv_head = unit // n_splits % a.n_kv_heads
        first = (n_blocks - 1 - unit // n_splits // a.n_kv_heads) * ATTENTION_ROWS
        n = min(ATTENTION_ROWS, n_rows - first)
        start = _chunk_start(a, step.position + first // _group(a))
        end = _chunk_end(step.position + (first + n - 1) // _group(a))
        if is_split:
            start += split
            end = start + 1
        _gather_queries(a, kv_head, first, n, queries)
        for r in range(n):
            _clear_part(a, advance(totals, r * _part_floats(a)))
        for chunk in range(start, end):
            _attend_rows(a, step, kv_head, chunk, first, n, queries, totals, rest, load)
        for r in range(n):
            total = advance(totals, r * _part_floats(a))
            if is_split:
                _keep_part(a, total, (split * a.n_kv_heads + kv_head) * n_rows + first + r)
            else:
                _write_row(a, kv_head, first + r, total)
        unit = next_unit(me, 1)


def merge_chunks(a: Operands, step: Operands, me: Operands) -> None:
    """Operation MERGE_CHUNKS, for a step of one position. A unit is a query head."""
    n_chunks = _chunk_end(step.position) - _chunk_start(a, step.position)
    total = as_f32(me.scratch)
    head = next_unit(me, 1)
    while head < a.n_heads:
        _clear_part(a, total)
        for chunk in range(n_chunks):
            _merge(a, total, advance(a.parts, (chunk * a.n_heads + head) * _part_floats(a)))
        _write_row(a, head // _group(a), head % _group(a), total)
        head = next_unit(me, 1)


@inline
def _row_offset(a: Operands, kv_head: int, row: int) -> int:
    """Where row ``row`` of a KV head is in queries and outputs [T, n_heads, head_dim]."""
    t = row // _group(a)
    return (t * a.n_heads + kv_head * _group(a) + row % _group(a)) * a.head_dim


@inline
def _gather_queries(a: Operands, kv_head: int, first: int, n: int, queries: Pointer) -> None:
    """Rows ``first`` to first + n, times the score factor, and zeros up to whole blocks of rows: [rows, head_dim]."""
    for r in range((n + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS):
        row = advance(queries, r * a.head_dim)
        q = advance(a.q, _row_offset(a, kv_head, first + min(r, n - 1)))
        for i in range(a.head_dim):
            row[i] = q[i] * np.float32(a.scale) if r < n else np.float32(0)


# ---------------------------------------------------------------------------------------------------------------------
# Parts


@inline
def _clear_part(a: Operands, part: Pointer) -> None:
    part[0] = _NONE
    for i in range(1, _part_floats(a)):
        part[i] = np.float32(0)


@inline
def _keep_part(a: Operands, total: Pointer, index: int) -> None:
    kept = advance(a.parts, index * _part_floats(a))
    for i in range(0, _part_floats(a), LANES):
        store_f32(kept, i, load_f32(total, i))


@inline
def _exp1(x: float) -> float:
    return max_f32(exp(spread_f32(x)))


@inline
def _merge(a: Operands, total: Pointer, part: Pointer) -> None:
    """Adds a later chunk's part to ``total``."""
    if part[0] == _NONE:
        return
    m = max(total[0], part[0])
    old = _exp1(total[0] - m)
    new = _exp1(part[0] - m)
    total[0] = m
    total[1] = total[1] * old + part[1] * new
    for i in range(LANES, _part_floats(a), LANES):
        store_f32(total, i, fma(load_f32(part, i), spread_f32(new), load_f32(total, i) * spread_f32(old)))


@inline
def _write_row(a: Operands, kv_head: int, row: int, total: Pointer) -> None:
    out = advance(a.out, _row_offset(a, kv_head, row))
    for i in range(a.head_dim):
        out[i] = total[LANES + i] / total[1]


# ---------------------------------------------------------------------------------------------------------------------
# One chunk


@inline
def _attend_rows(
    a: Operands,
    step: Operands,
    kv_head: int,
    chunk: int,
    first: int,
    n: int,
    queries: Pointer,
    totals: Pointer,
    rest: Pointer,
    load: Any,
) -> None:
    """Adds a chunk to the totals of rows ``first`` to first + n of a KV head."""
    parts = rest
    scores = advance(parts, ATTENTION_ROWS * _part_floats(a))
    wide = advance(scores, ATTENTION_ROWS * CHUNK)
    base = chunk * CHUNK
    # Positions in the chunk that any of the rows attends to.
    start = max(0, _first_position(a, step.position + first // _group(a)) - base)
    end = min(CHUNK, step.position + (first + n - 1) // _group(a) + 1 - base)
    tile = kv_head * (a.n_ctx // LANES) + base // LANES
    keys = advance(a.keys, tile * a.head_dim * LANES * a.item_bytes)
    _score_rows(a, n, start, end, keys, queries, scores, wide, load)
    for r in range(n):
        position = step.position + (first + r) // _group(a)
        valid = max(start, _first_position(a, position) - base)
        part = advance(parts, r * _part_floats(a))
        _weigh(a, advance(scores, r * CHUNK), start, end, valid, min(end, position + 1 - base), part)
    values = advance(a.values, (kv_head * _padded(a.head_dim) * a.n_ctx + base * LANES) * a.item_bytes)
    _sum_values(a, n, start, end, values, scores, parts, wide, load)
    for r in range(n):
        _merge(a, advance(totals, r * _part_floats(a)), advance(parts, r * _part_floats(a)))


@inline
def _weigh(a: Operands, scores: Pointer, start: int, end: int, valid: int, valid_end: int, part: Pointer) -> None:
    """Caps one row's scores, and replaces them by exp(score - m); 0 outside ``valid`` to ``valid_end``."""
    first = start // LANES * LANES
    largest = spread_f32(_NONE)
    for i in range(first, end, LANES):
        score = load_f32(scores, i)
        if a.softcap:
            score = soft_cap(score, a.softcap)
        if i < valid or i + LANES > valid_end:
            at = lane_numbers() + np.float32(i)
            score = select((at >= np.float32(valid)) & (at < np.float32(valid_end)), score, spread_f32(_NONE))
        store_f32(scores, i, score)
        largest = maximum(score, largest)
    m = max_f32(largest)
    part[0] = m
    total = zero_f32()
    for i in range(first, end, LANES):
        score = load_f32(scores, i)
        weight = exp_of_negative(score - m)
        if i < valid or i + LANES > valid_end:
            weight = select(score > _NONE, weight, zero_f32())
        store_f32(scores, i, weight)
        total = total + weight
    part[1] = sum_f32(total)


@inline
def _score_rows(
    a: Operands,
    n: int,
    start: int,
    end: int,
    keys: Pointer,
    queries: Pointer,
    scores: Pointer,
    wide: Pointer,
    load: Any,
) -> None:
    """scores[r, i] = Σ_d query[r, d] · key[i, d], d ascending, for the tiles of positions ``start`` to ``end``."""
    if n <= 2:
        for i in range(start // LANES * LANES, end, 4 * LANES):
            _score_2(a, n, i, keys, queries, scores, load)
        return
    for i in range(start // LANES * LANES, end, PAIR):
        for d in range(a.head_dim):
            o = i * a.head_dim + d * LANES
            store_f32(wide, d * PAIR, load(keys, o))
            store_f32(wide, d * PAIR + LANES, load(keys, o + a.head_dim * LANES))
        for r in range(0, n, BLOCK_ROWS):
            score_block(a.head_dim, advance(queries, r * a.head_dim), wide, advance(scores, r * CHUNK + i))


@inline
def _score_2(a: Operands, n: int, i: int, keys: Pointer, queries: Pointer, scores: Pointer, load: Any) -> None:
    """1 or 2 rows, 32 positions from ``i`` on, straight from the cache."""
    other = advance(queries, (n - 1) * a.head_dim)
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = zero_f32()
    tile = LANES * a.head_dim
    for d in range(a.head_dim):
        o = i * a.head_dim + d * LANES
        k0 = load(keys, o)
        k1 = load(keys, o + tile)
        k2 = load(keys, o + 2 * tile)
        k3 = load(keys, o + 3 * tile)
        q = spread_f32(queries[d])
        s0 = fma(q, k0, s0)
        s1 = fma(q, k1, s1)
        s2 = fma(q, k2, s2)
        s3 = fma(q, k3, s3)
        q = spread_f32(other[d])
        t0 = fma(q, k0, t0)
        t1 = fma(q, k1, t1)
        t2 = fma(q, k2, t2)
        t3 = fma(q, k3, t3)
    store_f32(scores, i, s0)
    store_f32(scores, i + LANES, s1)
    store_f32(scores, i + 2 * LANES, s2)
    store_f32(scores, i + 3 * LANES, s3)
    store_f32(scores, i + CHUNK, t0)
    store_f32(scores, i + CHUNK + LANES, t1)
    store_f32(scores, i + CHUNK + 2 * LANES, t2)
    store_f32(scores, i + CHUNK + 3 * LANES, t3)


@inline
def _sum_values(
    a: Operands,
    n: int,
    start: int,
    end: int,
    values: Pointer,
    weights: Pointer,
    parts: Pointer,
    wide: Pointer,
    load: Any,
) -> None:
    """o[r, d] = Σ_i weight[r, i] · value[i, d], i ascending. The last 8 dimensions may be done twice."""
    n_groups = _padded(a.head_dim) // LANES
    if n <= 2:
        for g in range(0, n_groups, 4):
            _sum_2(a, n, g, n_groups, start, end, values, weights, advance(parts, LANES), load)
        return
    for g in range(0, n_groups, 2):
        first = g * a.n_ctx
        second = min(g + 1, n_groups - 1) * a.n_ctx
        for i in range(start, end):
            store_f32(wide, i * PAIR, load(values, (first + i) * LANES))
            store_f32(wide, i * PAIR + LANES, load(values, (second + i) * LANES))
        for r in range(0, n, BLOCK_ROWS):
            out = advance(parts, r * _part_floats(a) + LANES)
            sum_block(
                start,
                end,
                advance(weights, r * CHUNK),
                wide,
                out,
                g * LANES,
                min(g + 1, n_groups - 1) * LANES,
                _part_floats(a),
            )


@inline
def _sum_2(
    a: Operands,
    n: int,
    g: int,
    n_groups: int,
    start: int,
    end: int,
    values: Pointer,
    weights: Pointer,
    out: Pointer,
    load: Any,
) -> None:
    """1 or 2 rows, 32 dimensions, straight from the cache; groups after the last repeat it."""
    g1 = min(g + 1, n_groups - 1)
    g2 = min(g + 2, n_groups - 1)
    g3 = min(g + 3, n_groups - 1)
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = zero_f32()
    for i in range(start, end):
        v0 = load(values, (g * a.n_ctx + i) * LANES)
        v1 = load(values, (g1 * a.n_ctx + i) * LANES)
        v2 = load(values, (g2 * a.n_ctx + i) * LANES)
        v3 = load(values, (g3 * a.n_ctx + i) * LANES)
        w = spread_f32(weights[i])
        s0 = fma(w, v0, s0)
        s1 = fma(w, v1, s1)
        s2 = fma(w, v2, s2)
        s3 = fma(w, v3, s3)
        w = spread_f32(weights[i + CHUNK])
        t0 = fma(w, v0, t0)
        t1 = fma(w, v1, t1)
        t2 = fma(w, v2, t2)
        t3 = fma(w, v3, t3)
    store_f32(out, g * LANES, s0)
    store_f32(out, g1 * LANES, s1)
    store_f32(out, g2 * LANES, s2)
    store_f32(out, g3 * LANES, s3)
    if n > 1:
        second = advance(out, _part_floats(a))
        store_f32(second, g * LANES, t0)
        store_f32(second, g1 * LANES, t1)
        store_f32(second, g2 * LANES, t2)
        store_f32(second, g3 * LANES, t3)
