"""Linear attention: the gated delta rule, recurrent over positions, parallel over channels and heads.

Source: the .mlb specification, "Linear attention"; the numbers of its steps are in the comments. The state of a layer
is ``recent`` float32 [lin_conv - 1, channels], the last inputs of the convolution, oldest first, and ``memory`` float32
[V, dv / 8, dk, 8] with dv rounded up to a multiple of 8.
"""

from __future__ import annotations

import math

import numpy as np

from krafla_cli.kernels.functions import silu
from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.norms import inverse_rms, sum_of_squares
from krafla_cli.kernels.simd import advance, as_f32, fma, load_f32, spread_f32, store_f32, zero_f32
from krafla_cli.kernels.simd_types import Operands, Pointer
from krafla_cli.kernels.threads import next_unit

_LANES = 8
_UNIT_CHANNELS = 64
_L2_EPS = np.float32(1e-6)


def convolve(a: Operands, step: Operands, me: Operands) -> None:
    """Operation CONVOLVE. A unit is 64 channels of all positions; fewer than 8 at the end go one by one."""
    first = next_unit(me, _UNIT_CHANNELS)
    while first < a.n_channels:
        end = min(first + _UNIT_CHANNELS, a.n_channels)
        whole = first + (end - first) // _LANES * _LANES
        for c in range(first, whole, _LANES):
            for t in range(step.n_tokens):
                store_f32(a.out, t * a.n_channels + c, silu(_convolved(a, t, c)))
        for c in range(whole, end):
            for t in range(step.n_tokens):
                a.out[t * a.n_channels + c] = _convolved_one(a, t, c, as_f32(me.scratch))
        for c in range(first, end):
            _keep_recent(a, c, step.n_tokens)
        first = next_unit(me, _UNIT_CHANNELS)


@inline
def _input(a: Operands, t: int, c: int) -> Pointer:
    """Where the input of channel c at position t of this step is; before position 0, the recent ones."""
    if t >= 0:
        return advance(a.x, t * a.n_channels + c)
    return advance(a.recent, (t + a.n_taps - 1) * a.n_channels + c)


@inline
def _convolved(a: Operands, t: int, c: int) -> object:
    """1. Σ tap · input, the oldest input first, of 8 channels; taps [n_taps, n_channels]."""
    total = zero_f32()
    for i in range(a.n_taps):
        x = load_f32(_input(a, t - a.n_taps + 1 + i, c), 0)
        total = total + x * load_f32(a.taps, i * a.n_channels + c)
    return total


@inline
def _convolved_one(a: Operands, t: int, c: int, scratch: Pointer) -> float:
    total = np.float32(0)
    for i in range(a.n_taps):
        total += _input(a, t - a.n_taps + 1 + i, c)[0] * a.taps[i * a.n_channels + c]
    store_f32(scratch, 0, silu(spread_f32(total)))
    return scratch[0]


@inline
def _keep_recent(a: Operands, c: int, n_tokens: int) -> None:
    for i in range(a.n_taps - 1):
        a.recent[i * a.n_channels + c] = _input(a, n_tokens - a.n_taps + 1 + i, c)[0]


def normalize_keys(a: Operands, step: Operands, me: Operands) -> None:
    """Operation NORMALIZE_KEYS: 2. A unit is one query or key head of one position; and one unit the gates of one."""
    n = 2 * a.n_k_heads + 1
    unit = next_unit(me, 1)
    while unit < step.n_tokens * n:
        t = unit // n
        h = unit % n
        if h < 2 * a.n_k_heads:
            head = advance(a.x, t * a.n_channels + h * a.k_dim)
            scale = np.float32(1) / np.sqrt(sum_of_squares(head, a.k_dim) + _L2_EPS)
            if h < a.n_k_heads:
                scale *= np.float32(a.query_scale)
            for i in range(a.k_dim):
                head[i] = head[i] * scale
        else:
            _gates(a, t)
        unit = next_unit(me, 1)


@inline
def _gates(a: Operands, t: int) -> None:
    """3. β = sigmoid(b) and the decay exp(g), g = -exp(A_log) · softplus(a + dt_bias), in place of b and a."""
    for h in range(a.n_v_heads):
        i = t * a.n_v_heads + h
        a.beta[i] = np.float32(1.0 / (1.0 + math.exp(-float(a.beta[i]))))
        x = float(a.decay[i]) + float(a.dt_bias[h])
        softplus = x if x > 30.0 else math.log1p(math.exp(x))
        a.decay[i] = np.float32(math.exp(-math.exp(float(a.a_log[h])) * softplus))


def delta_rule(a: Operands, step: Operands, me: Operands) -> None:
    """Operation DELTA_RULE: 4. A unit is 8 dimensions of a value head: they do not depend on the others."""
    n_groups = (a.v_dim + _LANES - 1) // _LANES
    keys_size = a.n_k_heads * a.k_dim
    unit = next_unit(me, 1)
    while unit < a.n_v_heads * n_groups:
        h = unit // n_groups
        g = unit % n_groups
        k_head = h // (a.n_v_heads // a.n_k_heads)
        memory = advance(a.memory, unit * a.k_dim * _LANES)
        width = min(_LANES, a.v_dim - g * _LANES)
        for t in range(step.n_tokens):
            x = advance(a.x, t * a.n_channels)
            q = advance(x, k_head * a.k_dim)
            k = advance(x, keys_size + k_head * a.k_dim)
            v = advance(x, 2 * keys_size + h * a.v_dim + g * _LANES)
            out = advance(a.out, (t * a.n_v_heads + h) * a.v_dim + g * _LANES)
            gate = t * a.n_v_heads + h
            _update(memory, q, k, v, a.beta[gate], a.decay[gate], a.k_dim, out, width, as_f32(me.scratch))
        unit = next_unit(me, 1)


@inline
def _update(
    memory: Pointer,
    q: Pointer,
    k: Pointer,
    v: Pointer,
    beta: float,
    decay: float,
    n: int,
    out: Pointer,
    width: int,
    scratch: Pointer,
) -> None:
    """S <- S · decay; S <- S + k (β (v - Sᵀk))ᵀ; out = Sᵀq. Sums over dk in four parts, so that they overlap."""
    d = spread_f32(decay)
    s0 = s1 = s2 = s3 = zero_f32()
    n_4 = n // 4 * 4
    for i in range(0, n_4, 4):
        s0 = fma(spread_f32(k[i]), load_f32(memory, i * _LANES) * d, s0)
        s1 = fma(spread_f32(k[i + 1]), load_f32(memory, i * _LANES + 8) * d, s1)
        s2 = fma(spread_f32(k[i + 2]), load_f32(memory, i * _LANES + 16) * d, s2)
        s3 = fma(spread_f32(k[i + 3]), load_f32(memory, i * _LANES + 24) * d, s3)
    for i in range(n_4, n):
        s0 = fma(spread_f32(k[i]), load_f32(memory, i * _LANES) * d, s0)
    error = (_load_lanes(v, width, scratch) - ((s0 + s1) + (s2 + s3))) * spread_f32(beta)
    s0 = s1 = s2 = s3 = zero_f32()
    for i in range(0, n_4, 4):
        s0 = fma(spread_f32(q[i]), _moved_on(memory, i, k[i], error, d), s0)
        s1 = fma(spread_f32(q[i + 1]), _moved_on(memory, i + 1, k[i + 1], error, d), s1)
        s2 = fma(spread_f32(q[i + 2]), _moved_on(memory, i + 2, k[i + 2], error, d), s2)
        s3 = fma(spread_f32(q[i + 3]), _moved_on(memory, i + 3, k[i + 3], error, d), s3)
    for i in range(n_4, n):
        s0 = fma(spread_f32(q[i]), _moved_on(memory, i, k[i], error, d), s0)
    total = (s0 + s1) + (s2 + s3)
    if width == _LANES:
        store_f32(out, 0, total)
    else:
        store_f32(scratch, 0, total)
        for lane in range(width):
            out[lane] = scratch[lane]


@inline
def _moved_on(memory: Pointer, i: int, k: float, error: object, decay: object) -> object:
    """Row i of S after this position."""
    row = fma(spread_f32(k), error, load_f32(memory, i * _LANES) * decay)
    store_f32(memory, i * _LANES, row)
    return row


@inline
def _load_lanes(v: Pointer, width: int, scratch: Pointer) -> object:
    """``width`` values, and zeros up to 8."""
    if width == _LANES:
        return load_f32(v, 0)
    for lane in range(_LANES):
        scratch[lane] = v[lane] if lane < width else np.float32(0)
    return load_f32(scratch, 0)


def norm_gate_heads(a: Operands, step: Operands, me: Operands) -> None:
    """Operation NORM_GATE_HEADS: 5. A unit is one value head of one position."""
    unit = next_unit(me, 1)
    scratch = as_f32(me.scratch)
    n_8 = a.v_dim // _LANES * _LANES
    while unit < step.n_tokens * a.n_v_heads:
        x = advance(a.x, unit * a.v_dim)
        z = advance(a.z, unit * a.v_dim)
        scale = inverse_rms(x, a.v_dim, a.eps)
        for i in range(0, n_8, _LANES):
            normed = load_f32(x, i) * spread_f32(scale) * load_f32(a.weight, i)
            store_f32(x, i, normed * silu(load_f32(z, i)))
        for i in range(n_8, a.v_dim):
            store_f32(scratch, 0, silu(spread_f32(z[i])))
            x[i] = x[i] * scale * a.weight[i] * scratch[0]
        unit = next_unit(me, 1)
