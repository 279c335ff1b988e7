"""Query, key and value heads between their projections and attention: bias, norm, RoPE, and into the cache.

The cache of a layer, for fast reading: keys [KV heads, n_ctx / 8, head_dim, 8 positions] and values
[KV heads, head_dim / 8, n_ctx, 8 dimensions], both f16 or float32, with head_dim rounded up to a multiple of 8 in the
values. Numbers beyond f16 become its largest.
"""

from __future__ import annotations

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.norms import inverse_rms
from krafla_cli.kernels.simd import (
    advance,
    as_f16,
    as_f32,
    load_f32,
    maximum,
    minimum,
    spread_f32,
    store_f16,
    store_f32,
)
from krafla_cli.kernels.simd_types import Operands, Pointer
from krafla_cli.kernels.threads import next_unit

_LANES = 8
_F16_MAX = 65504.0


def prepare_heads(a: Operands, step: Operands, me: Operands) -> None:
    """Operation PREPARE_HEADS. A unit is one head of one position: queries first, then keys, then values."""
    n_all = a.n_heads + 2 * a.n_kv_heads
    head = as_f32(me.scratch)
    unit = next_unit(me, 1)
    while unit < step.n_tokens * n_all:
        t = unit // n_all
        h = unit % n_all
        if h < a.n_heads:
            q = advance(a.q, (t * a.n_heads + h) * a.head_dim)
            _load_head(q, a.q_bias, a.has_bias, h, a.head_dim, head)
            _norm_and_rotate(a, head, a.q_norm, t, step)
            for i in range(a.head_dim):
                q[i] = head[i]
        elif h < a.n_heads + a.n_kv_heads:
            h -= a.n_heads
            _load_head(advance(a.k, (t * a.n_kv_heads + h) * a.head_dim), a.k_bias, a.has_bias, h, a.head_dim, head)
            _norm_and_rotate(a, head, a.k_norm, t, step)
            _append_key(a, head, h, step.position + t)
        else:
            h -= a.n_heads + a.n_kv_heads
            _load_head(advance(a.v, (t * a.n_kv_heads + h) * a.head_dim), a.v_bias, a.has_bias, h, a.head_dim, head)
            _append_value(a, head, h, step.position + t)
        unit = next_unit(me, 1)


@inline
def _load_head(x: Pointer, bias: Pointer, has_bias: int, h: int, n: int, head: Pointer) -> None:
    """The head's values plus bias, and zeros up to a multiple of 8."""
    for i in range(n):
        head[i] = x[i] + bias[h * n + i] if has_bias else x[i]
    for i in range(n, (n + _LANES - 1) // _LANES * _LANES):
        head[i] = np.float32(0)


@inline
def _norm_and_rotate(a: Operands, head: Pointer, norm: Pointer, t: int, step: Operands) -> None:
    if a.has_norm:
        scale = inverse_rms(head, a.head_dim, a.eps)
        for i in range(a.head_dim):
            head[i] = head[i] * scale * norm[i]
    if a.rot_dim:
        n_pairs = a.rot_dim // 2
        cos = advance(a.cos, (step.position + t) * n_pairs)
        sin = advance(a.sin, (step.position + t) * n_pairs)
        for i in range(n_pairs):
            even = head[2 * i]
            odd = head[2 * i + 1]
            head[2 * i] = even * cos[i] - odd * sin[i]
            head[2 * i + 1] = even * sin[i] + odd * cos[i]


@inline
def _to_f16(head: Pointer, n: int) -> Pointer:
    """The head's values as f16, after them in scratch memory."""
    out = as_f16(advance(head, (n + _LANES - 1) // _LANES * _LANES))
    for i in range(0, n, _LANES):
        v = maximum(minimum(load_f32(head, i), spread_f32(_F16_MAX)), spread_f32(-_F16_MAX))
        store_f16(out, i, v)
    return out


@inline
def _append_key(a: Operands, head: Pointer, h: int, position: int) -> None:
    tile = (h * (a.n_ctx // _LANES) + position // _LANES) * a.head_dim * _LANES + position % _LANES
    if a.is_f16:
        halves = _to_f16(head, a.head_dim)
        keys = as_f16(a.keys)
        for i in range(a.head_dim):
            keys[tile + i * _LANES] = halves[i]
    else:
        floats = as_f32(a.keys)
        for i in range(a.head_dim):
            floats[tile + i * _LANES] = head[i]


@inline
def _append_value(a: Operands, head: Pointer, h: int, position: int) -> None:
    n_groups = (a.head_dim + _LANES - 1) // _LANES
    for g in range(n_groups):
        o = ((h * n_groups + g) * a.n_ctx + position) * _LANES
        v = load_f32(head, g * _LANES)
        if a.is_f16:
            v = maximum(minimum(v, spread_f32(_F16_MAX)), spread_f32(-_F16_MAX))
            store_f16(as_f16(a.values), o, v)
        else:
            store_f32(as_f32(a.values), o, v)
