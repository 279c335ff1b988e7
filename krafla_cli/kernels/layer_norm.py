"""LayerNorm with what comes before and after it in LEMB's forward pass: GELU, the codes of section 6.3, the mean.

The sums of a row run in four vectors of partial sums, then one, then the last values one by one: a row's result does
not depend on the rows around it. A row that holds NaN or infinity stays not finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels.functions import gelu
from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import (
    absolute,
    advance,
    fma,
    load_f32,
    max_f32,
    maximum,
    minimum,
    pack_i8,
    spread_f32,
    store_f32,
    store_i8,
    sum_f32,
    truncate,
    zero_f32,
)
from krafla_cli.kernels.simd_quantize import round_even
from krafla_cli.kernels.simd_types import F32x8, I32x8, Operands, Pointer
from krafla_cli.kernels.text_operations import GELU, NORM
from krafla_cli.kernels.threads import next_unit

_EPS = np.float32(1e-5)
_RANGE = np.float32(128)  # section 6.3, detail 3: 128, not 127
_MIN_MAGNITUDE = np.float32(1e-5)
_LARGEST_FLOAT = np.float32(3.4028235e38)
_ROWS_PER_UNIT = 16
_BLOCK = 32


def prepare_rows(a: Operands, batch: Operands, me: Operands) -> None:
    """Operation PREPARE."""
    first = next_unit(me, _ROWS_PER_UNIT)
    while first < batch.n_tokens:
        for t in range(first, min(first + _ROWS_PER_UNIT, batch.n_tokens)):
            x = advance(a.x, t * a.stride)
            out = advance(a.out, t * a.stride)
            if a.before == NORM:
                _affine_norm(a, x, out)
            elif a.before == GELU:
                for i in range(0, a.stride, 8):
                    store_f32(out, i, gelu(load_f32(x, i)))
            if a.quantize:
                _quantize(a, out, t)
        first = next_unit(me, _ROWS_PER_UNIT)


def pool_texts(a: Operands, batch: Operands, me: Operands) -> None:
    """Operation POOL."""
    text = next_unit(me, 1)
    while text < batch.n_texts:
        out = advance(a.out, text * a.stride)
        for i in range(0, a.stride, 8):
            store_f32(out, i, zero_f32())
        for t in range(batch.starts[text], batch.starts[text + 1]):
            x = advance(a.x, t * a.stride)
            mean, inverse = _mean_and_inverse(x, a.n_cols)
            for i in range(0, a.stride, 8):
                store_f32(out, i, fma(load_f32(x, i) - mean, spread_f32(inverse), load_f32(out, i)))
        share = np.float32(1) / np.float32(batch.starts[text + 1] - batch.starts[text])
        for i in range(0, a.stride, 8):
            store_f32(out, i, fma(load_f32(out, i) * share, load_f32(a.weight, i), load_f32(a.bias, i)))
        text = next_unit(me, 1)


@inline
def _affine_norm(a: Operands, x: Pointer, out: Pointer) -> None:
    """LayerNorm times ``weight`` plus ``bias``: zero behind the columns, where both are."""
    mean, inverse = _mean_and_inverse(x, a.n_cols)
    for i in range(0, a.stride, 8):
        unit = (load_f32(x, i) - mean) * spread_f32(inverse)
        store_f32(out, i, fma(unit, load_f32(a.weight, i), load_f32(a.bias, i)))


@inline
def _mean_and_inverse(x: Pointer, n: int) -> Any:
    """The mean of ``n`` values, and 1 / sqrt(their biased variance + eps), float32."""
    s0 = s1 = s2 = s3 = zero_f32()
    n_32, n_8 = n // 32 * 32, n // 8 * 8
    for i in range(0, n_32, 32):
        s0 = s0 + load_f32(x, i)
        s1 = s1 + load_f32(x, i + 8)
        s2 = s2 + load_f32(x, i + 16)
        s3 = s3 + load_f32(x, i + 24)
    for i in range(n_32, n_8, 8):
        s0 = s0 + load_f32(x, i)
    total = sum_f32((s0 + s1) + (s2 + s3))
    for i in range(n_8, n):
        total += x[i]
    mean = total / np.float32(n)
    variance = _centered_squares(x, n, mean) / np.float32(n)
    if not variance <= _LARGEST_FLOAT:  # 1 / infinity would make zeros of the row
        variance = np.float32(np.nan)
    return mean, np.float32(1) / np.sqrt(variance + _EPS)


@inline
def _centered_squares(x: Pointer, n: int, mean: float) -> float:
    """Σ (x - mean)²."""
    m = spread_f32(mean)
    s0 = s1 = s2 = s3 = zero_f32()
    n_32, n_8 = n // 32 * 32, n // 8 * 8
    for i in range(0, n_32, 32):
        v = load_f32(x, i) - m
        s0 = fma(v, v, s0)
        v = load_f32(x, i + 8) - m
        s1 = fma(v, v, s1)
        v = load_f32(x, i + 16) - m
        s2 = fma(v, v, s2)
        v = load_f32(x, i + 24) - m
        s3 = fma(v, v, s3)
    for i in range(n_32, n_8, 8):
        v = load_f32(x, i) - m
        s0 = fma(v, v, s0)
    total = sum_f32((s0 + s1) + (s2 + s3))
    for i in range(n_8, n):
        total += (x[i] - mean) * (x[i] - mean)
    return total


@inline
def _largest_distance(x: Pointer, n: int, mean: float) -> float:
    """The largest |x - mean|."""
    m = spread_f32(mean)
    s0 = s1 = zero_f32()
    n_16 = n // 16 * 16
    for i in range(0, n_16, 16):
        s0 = maximum(s0, absolute(load_f32(x, i) - m))
        s1 = maximum(s1, absolute(load_f32(x, i + 8) - m))
    largest = max_f32(maximum(s0, s1))
    for i in range(n_16, n):
        largest = max(largest, abs(x[i] - mean))
    return largest


@inline
def _quantize(a: Operands, x: Pointer, t: int) -> None:
    """Section 6.3's x_scale and x_quant, the latter + 128. The codes behind the columns have no meaning."""
    mean, inverse = _mean_and_inverse(x, a.n_cols)
    magnitude = _largest_distance(x, a.n_cols, mean) * inverse  # NaN where the row is not finite, by ``inverse``
    if magnitude < _MIN_MAGNITUDE:
        magnitude = _MIN_MAGNITUDE
    x_scale = _RANGE / magnitude
    a.x_scale[t] = x_scale
    codes = advance(a.codes, t * a.stride)
    for i in range(0, a.n_cols, _BLOCK):
        q0 = _levels(load_f32(x, i), mean, inverse, x_scale)
        q1 = _levels(load_f32(x, i + 8), mean, inverse, x_scale)
        q2 = _levels(load_f32(x, i + 16), mean, inverse, x_scale)
        q3 = _levels(load_f32(x, i + 24), mean, inverse, x_scale)
        store_i8(codes, i, pack_i8(q0, q1, q2, q3))


@inline
def _levels(x: F32x8, mean: float, inverse: float, x_scale: float) -> I32x8:
    """round(x_norm · x_scale), ties to even, limited to -128 .. 127, + 128."""
    level = round_even((x - mean) * spread_f32(inverse) * spread_f32(x_scale))
    return truncate(maximum(minimum(level, spread_f32(127.0)), spread_f32(-128.0))) + 128
