"""Attention over the cache in chunks of 256 fixed positions, with a softmax that merges chunks in ascending order.

A row is one query head of one position. For a row and a chunk, attention gives a part of three: the largest score m,
the sum l of exp(score - m), and the sum o of exp(score - m) · value. Parts of ascending chunks are merged in one way
only, so that a row's result depends neither on the other rows of its step nor on which thread did which chunk.

Rows of one KV head go together (8, or 2 where few are left), so that a key or value is read once for all of them.
Positions are the lanes of scores, dimensions those of values; see heads.py for the cache's layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels.functions import exp, soft_cap
from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.operations import CHUNK
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

_LANES = 8
_ROWS = 8
_SCORES = _ROWS * CHUNK
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
    return (head_dim + _LANES - 1) // _LANES * _LANES


@inline
def _part_floats(a: Operands) -> int:
    return _LANES + _padded(a.head_dim)


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
    """A unit is up to 8 rows of a KV head, with all their chunks; the last rows, which take longest, go first.

    Where the step is one position, a unit is one chunk, so that there is work for all threads.
    """
    scores = as_f32(me.scratch)
    parts = advance(scores, _SCORES)
    totals = advance(parts, _ROWS * _part_floats(a))
    is_split = step.n_tokens == 1
    n_rows = step.n_tokens * _group(a)
    n_blocks = (n_rows + _ROWS - 1) // _ROWS
    n_splits = _chunk_end(step.position) - _chunk_start(a, step.position) if is_split else 1
    unit = next_unit(me, 1)
    while unit < n_splits * n_blocks * a.n_kv_heads:
        split = unit % n_splits
        kv_head = unit // n_splits % a.n_kv_heads
        first = (n_blocks - 1 - unit // n_splits // a.n_kv_heads) * _ROWS
        n = min(_ROWS, n_rows - first)
        start = _chunk_start(a, step.position + first // _group(a))
        end = _chunk_end(step.position + (first + n - 1) // _group(a))
        if is_split:
            start += split
            end = start + 1
        for r in range(n):
            _clear_part(a, advance(totals, r * _part_floats(a)))
        for chunk in range(start, end):
            _attend_rows(a, step, kv_head, chunk, first, n, scores, parts, load)
            for r in range(n):
                _merge(a, advance(totals, r * _part_floats(a)), advance(parts, r * _part_floats(a)))
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
    for i in range(0, _part_floats(a), _LANES):
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
    for i in range(_LANES, _part_floats(a), _LANES):
        store_f32(total, i, fma(load_f32(part, i), spread_f32(new), load_f32(total, i) * spread_f32(old)))


@inline
def _query_offset(a: Operands, kv_head: int, row: int) -> int:
    """Where row ``row`` of a KV head is in queries and outputs [T, n_heads, head_dim]."""
    t = row // _group(a)
    return (t * a.n_heads + kv_head * _group(a) + row % _group(a)) * a.head_dim


@inline
def _write_row(a: Operands, kv_head: int, row: int, total: Pointer) -> None:
    out = advance(a.out, _query_offset(a, kv_head, row))
    for i in range(a.head_dim):
        out[i] = total[_LANES + i] / total[1]


# ---------------------------------------------------------------------------------------------------------------------
# One chunk, up to 8 rows


@inline
def _attend_rows(
    a: Operands,
    step: Operands,
    kv_head: int,
    chunk: int,
    first: int,
    n: int,
    scores: Pointer,
    parts: Pointer,
    load: Any,
) -> None:
    """Parts of rows ``first`` to first + n of a KV head for one chunk."""
    group = _group(a)
    base = chunk * CHUNK
    # Positions in the chunk that any of the rows attends to.
    start = max(0, _first_position(a, step.position + first // group) - base)
    end = min(CHUNK, step.position + (first + n - 1) // group + 1 - base)
    tile = kv_head * (a.n_ctx // _LANES) + base // _LANES
    keys = advance(a.keys, tile * a.head_dim * _LANES * a.item_bytes)
    _score_rows(a, kv_head, first, n, start, end, keys, scores, load)
    for r in range(n):
        position = step.position + (first + r) // group
        part = advance(parts, r * _part_floats(a))
        valid = max(start, _first_position(a, position) - base)
        _weigh(a, advance(scores, r * CHUNK), start, end, valid, min(end, position + 1 - base), part)
    n_groups = _padded(a.head_dim) // _LANES
    values = advance(a.values, (kv_head * n_groups * a.n_ctx + base) * _LANES * a.item_bytes)
    _sum_values(a, n, start, end, values, scores, parts, load)


@inline
def _weigh(a: Operands, scores: Pointer, start: int, end: int, valid: int, valid_end: int, part: Pointer) -> None:
    """Scales and caps one row's scores, and replaces them by exp(score - m); 0 outside ``valid`` to ``valid_end``."""
    first = start // _LANES * _LANES
    largest = spread_f32(_NONE)
    for i in range(first, end, _LANES):
        at = lane_numbers() + np.float32(i)
        inside = (at >= np.float32(valid)) & (at < np.float32(valid_end))
        score = soft_cap(load_f32(scores, i) * spread_f32(a.scale), a.softcap)
        score = select(inside, score, spread_f32(_NONE))
        store_f32(scores, i, score)
        largest = maximum(score, largest)
    m = max_f32(largest)
    part[0] = m
    total = zero_f32()
    if m == _NONE:
        for i in range(first, end, _LANES):
            store_f32(scores, i, total)
    else:
        for i in range(first, end, _LANES):
            score = load_f32(scores, i)
            weight = select(score > _NONE, exp(score - m), zero_f32())
            store_f32(scores, i, weight)
            total = total + weight
    part[1] = sum_f32(total)


@inline
def _pick(p: Pointer, stride: int, r: int, n: int) -> Pointer:
    """Row ``r`` of ``n``; the last one again after it."""
    return advance(p, min(r, n - 1) * stride)


@inline
def _score_rows(
    a: Operands, kv_head: int, first: int, n: int, start: int, end: int, keys: Pointer, scores: Pointer, load: Any
) -> None:
    """scores[r, i] = Σ_d q[r, d] · key[i, d], d ascending, for the tiles of positions ``start`` to ``end``."""
    r = 0
    while r < n:
        if n - r > 4:
            for i in range(start // _LANES * _LANES, end, _LANES):
                _score_8(a, kv_head, first + r, n - r, i, keys, advance(scores, r * CHUNK), load)
            r += 8
        else:
            for i in range(start // _LANES * _LANES, end, 4 * _LANES):
                _score_2(a, kv_head, first + r, n - r, i, keys, advance(scores, r * CHUNK), load)
            r += 2


@inline
def _score_8(a: Operands, kv_head: int, row: int, n: int, i: int, keys: Pointer, scores: Pointer, load: Any) -> None:
    """8 rows, 8 positions from ``i`` on."""
    q0 = advance(a.q, _query_offset(a, kv_head, row))
    q1 = advance(a.q, _query_offset(a, kv_head, row + 1))
    q2 = advance(a.q, _query_offset(a, kv_head, row + 2))
    q3 = advance(a.q, _query_offset(a, kv_head, row + 3))
    q4 = advance(a.q, _query_offset(a, kv_head, row + 4))
    q5 = advance(a.q, _query_offset(a, kv_head, row + min(5, n - 1)))
    q6 = advance(a.q, _query_offset(a, kv_head, row + min(6, n - 1)))
    q7 = advance(a.q, _query_offset(a, kv_head, row + min(7, n - 1)))
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = zero_f32()
    for d in range(a.head_dim):
        k = load(keys, i * a.head_dim + d * _LANES)
        s0 = fma(spread_f32(q0[d]), k, s0)
        s1 = fma(spread_f32(q1[d]), k, s1)
        s2 = fma(spread_f32(q2[d]), k, s2)
        s3 = fma(spread_f32(q3[d]), k, s3)
        s4 = fma(spread_f32(q4[d]), k, s4)
        s5 = fma(spread_f32(q5[d]), k, s5)
        s6 = fma(spread_f32(q6[d]), k, s6)
        s7 = fma(spread_f32(q7[d]), k, s7)
    store_f32(scores, i, s0)
    store_f32(scores, i + CHUNK, s1)
    store_f32(scores, i + 2 * CHUNK, s2)
    store_f32(scores, i + 3 * CHUNK, s3)
    store_f32(scores, i + 4 * CHUNK, s4)
    store_f32(scores, i + 5 * CHUNK, s5)
    store_f32(scores, i + 6 * CHUNK, s6)
    store_f32(scores, i + 7 * CHUNK, s7)


@inline
def _score_2(a: Operands, kv_head: int, row: int, n: int, i: int, keys: Pointer, scores: Pointer, load: Any) -> None:
    """2 rows, 32 positions from ``i`` on."""
    q0 = advance(a.q, _query_offset(a, kv_head, row))
    q1 = advance(a.q, _query_offset(a, kv_head, row + min(1, n - 1)))
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = zero_f32()
    tile = _LANES * a.head_dim
    for d in range(a.head_dim):
        o = i * a.head_dim + d * _LANES
        k0 = load(keys, o)
        k1 = load(keys, o + tile)
        k2 = load(keys, o + 2 * tile)
        k3 = load(keys, o + 3 * tile)
        q = spread_f32(q0[d])
        s0 = fma(q, k0, s0)
        s1 = fma(q, k1, s1)
        s2 = fma(q, k2, s2)
        s3 = fma(q, k3, s3)
        q = spread_f32(q1[d])
        t0 = fma(q, k0, t0)
        t1 = fma(q, k1, t1)
        t2 = fma(q, k2, t2)
        t3 = fma(q, k3, t3)
    store_f32(scores, i, s0)
    store_f32(scores, i + 8, s1)
    store_f32(scores, i + 16, s2)
    store_f32(scores, i + 24, s3)
    store_f32(scores, i + CHUNK, t0)
    store_f32(scores, i + CHUNK + 8, t1)
    store_f32(scores, i + CHUNK + 16, t2)
    store_f32(scores, i + CHUNK + 24, t3)


@inline
def _sum_values(
    a: Operands, n: int, start: int, end: int, values: Pointer, scores: Pointer, parts: Pointer, load: Any
) -> None:
    """o[r, d] = Σ_i weight[r, i] · value[i, d], i ascending."""
    n_groups = _padded(a.head_dim) // _LANES
    r = 0
    while r < n:
        weights = advance(scores, r * CHUNK)
        outputs = advance(parts, r * _part_floats(a) + _LANES)
        if n - r > 4:
            for g in range(n_groups):
                _sum_8(a, n - r, g, start, end, values, weights, outputs, load)
            r += 8
        else:
            for g in range(0, n_groups, 4):
                _sum_2(a, n - r, g, n_groups, start, end, values, weights, outputs, load)
            r += 2


@inline
def _sum_8(
    a: Operands, n: int, g: int, start: int, end: int, values: Pointer, weights: Pointer, outputs: Pointer, load: Any
) -> None:
    """8 rows, 8 dimensions."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = zero_f32()
    for i in range(start, end):
        v = load(values, (g * a.n_ctx + i) * _LANES)
        s0 = fma(spread_f32(weights[i]), v, s0)
        s1 = fma(spread_f32(weights[i + CHUNK]), v, s1)
        s2 = fma(spread_f32(weights[i + 2 * CHUNK]), v, s2)
        s3 = fma(spread_f32(weights[i + 3 * CHUNK]), v, s3)
        s4 = fma(spread_f32(weights[i + 4 * CHUNK]), v, s4)
        s5 = fma(spread_f32(weights[i + 5 * CHUNK]), v, s5)
        s6 = fma(spread_f32(weights[i + 6 * CHUNK]), v, s6)
        s7 = fma(spread_f32(weights[i + 7 * CHUNK]), v, s7)
    part = _part_floats(a)
    o = g * _LANES
    store_f32(outputs, o, s0)
    store_f32(outputs, o + part, s1)
    store_f32(outputs, o + 2 * part, s2)
    store_f32(outputs, o + 3 * part, s3)
    store_f32(outputs, o + 4 * part, s4)
    if n > 5:
        store_f32(outputs, o + 5 * part, s5)
    if n > 6:
        store_f32(outputs, o + 6 * part, s6)
    if n > 7:
        store_f32(outputs, o + 7 * part, s7)


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
    outputs: Pointer,
    load: Any,
) -> None:
    """2 rows, 32 dimensions; groups after the last repeat it."""
    g1 = min(g + 1, n_groups - 1)
    g2 = min(g + 2, n_groups - 1)
    g3 = min(g + 3, n_groups - 1)
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = zero_f32()
    for i in range(start, end):
        v0 = load(values, (g * a.n_ctx + i) * _LANES)
        v1 = load(values, (g1 * a.n_ctx + i) * _LANES)
        v2 = load(values, (g2 * a.n_ctx + i) * _LANES)
        v3 = load(values, (g3 * a.n_ctx + i) * _LANES)
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
    store_f32(outputs, g * _LANES, s0)
    store_f32(outputs, g1 * _LANES, s1)
    store_f32(outputs, g2 * _LANES, s2)
    store_f32(outputs, g3 * _LANES, s3)
    if n > 1:
        outputs = advance(outputs, _part_floats(a))
        store_f32(outputs, g * _LANES, t0)
        store_f32(outputs, g1 * _LANES, t1)
        store_f32(outputs, g2 * _LANES, t2)
        store_f32(outputs, g3 * _LANES, t3)
