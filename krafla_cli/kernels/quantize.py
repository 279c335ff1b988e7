"""Q8_0, and what all block quantizers share. All are called through :mod:`~krafla_cli.kernels.quantize_rows`.

float32 without fused multiply-add, in the order written here: a scalar transcription of the specification gives the
same bits.
"""

from __future__ import annotations

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import (
    as_f16,
    as_f32,
    copysign,
    load_f16,
    load_f32,
    maximum,
    minimum,
    pack_i8,
    select,
    spread_f32,
    store_f16,
    store_f32,
    store_i8,
    truncate,
    zero_f32,
)
from krafla_cli.kernels.simd_quantize import all_set, as_i32, largest_bits, load_bf16
from krafla_cli.kernels.simd_types import F32x8, I32x8, Mask, Operands, Pointer

BLOCK = 32
F16_MAX = np.float32(65504)
F32_MAX = np.finfo(np.float32).max
_BF16, _F16 = 1, 2  # values of quantize_rows.WEIGHT_KINDS
_LEAST_Q8 = np.float32(1e-30)  # below, 127 / amax would overflow
_ZERO = np.float32(0)
_HALF = np.float32(0.5)
_ONE = np.float32(1)
_MAX_Q8 = np.float32(127)


@inline
def load_weights(w: Pointer, kind: int, i: int) -> F32x8:
    """The 8 weights from element ``i`` of the matrix on, as float32."""
    if kind == _BF16:
        return load_bf16(w, 2 * i)
    if kind == _F16:
        return load_f16(w, 2 * i)
    return load_f32(w, 4 * i)


@inline
def rounded_to_f16(x: F32x8, scratch: Pointer) -> F32x8:
    """The nearest f16 values (ties to even), widened again."""
    store_f16(scratch, 0, x)
    return load_f16(scratch, 0)


@inline
def store_scales(d: Pointer, block: int, n: int, scales: F32x8, scale_f16: int, scratch: Pointer) -> None:
    """Writes the first ``n`` scales, of ``block`` and those after it; f16 ones are representable."""
    if scale_f16 != 0:
        store_f16(scratch, 0, scales)
        for k in range(n):
            as_f16(d)[block + k] = as_f16(scratch)[k]
    else:
        store_f32(scratch, 0, scales)
        for k in range(n):
            as_f32(d)[block + k] = scratch[k]


@inline
def _largest(w: Pointer, kind: int, block: int, n: int, scratch: Pointer) -> F32x8:
    """The largest magnitude of each of ``n`` blocks, NaN where one is NaN; 0 for the others."""
    store_f32(scratch, 0, zero_f32())
    for k in range(n):
        i = (block + k) * BLOCK
        x0, x1 = load_weights(w, kind, i), load_weights(w, kind, i + 8)
        x2, x3 = load_weights(w, kind, i + 16), load_weights(w, kind, i + 24)
        as_i32(scratch)[k] = largest_bits(x0, x1, x2, x3)
    return load_f32(scratch, 0)


@inline
def _quants(x: F32x8, inverse: F32x8) -> I32x8:
    """trunc(x · inverse + copysign(0.5, x)), clamped to ±127."""
    level = x * inverse + copysign(spread_f32(_HALF), x)
    return truncate(minimum(maximum(level, spread_f32(-_MAX_Q8)), spread_f32(_MAX_Q8)))


@inline
def _first_bad(good: Mask, scratch: Pointer) -> int:
    """The first element that is not set, of which there is one."""
    store_f32(scratch, 0, select(good, spread_f32(_ONE), zero_f32()))
    first = 0
    while scratch[first] != _ZERO:
        first += 1
    return first


@inline
def _scales_q8(largest: F32x8, scale_f16: int, scratch: Pointer) -> tuple[F32x8, F32x8]:
    """The scales as they are stored, and the factors from weights to quants ("Quantization rule")."""
    scale = largest / _MAX_Q8
    if scale_f16 != 0:
        scale = rounded_to_f16(scale, scratch)
        return scale, select(scale > _ZERO, _ONE / scale, zero_f32())
    tiny = largest < _LEAST_Q8
    return select(tiny, zero_f32(), scale), select(tiny, zero_f32(), _MAX_Q8 / largest)


def quantize_q8_0(a: Operands, begin: int, end: int, scratch: Pointer) -> None:
    """Q8_0, 8 blocks of a row at a time; with f16 scales the quants are taken against the rounded scale."""
    w, kind, n_blocks, scale_f16, q, d = a.w, a.kind, a.n_blocks, a.scale_f16, a.q, a.d
    largest_scale = F16_MAX if scale_f16 != 0 else F32_MAX
    for row in range(begin, end):
        a.bad_block[row] = -1
        for b in range(0, n_blocks, 8):
            block = row * n_blocks + b
            n = min(8, n_blocks - b)
            largest = _largest(w, kind, block, n, scratch)
            good = largest / _MAX_Q8 <= largest_scale
            if not all_set(good):
                a.bad_block[row] = b + _first_bad(good, scratch)
                break
            scales, factors = _scales_q8(largest, scale_f16, scratch)
            store_scales(d, block, n, scales, scale_f16, scratch)
            store_f32(scratch, 0, factors)
            for k in range(n):
                f = spread_f32(scratch[k])
                i = (block + k) * BLOCK
                q0, q1 = _quants(load_weights(w, kind, i), f), _quants(load_weights(w, kind, i + 8), f)
                q2, q3 = _quants(load_weights(w, kind, i + 16), f), _quants(load_weights(w, kind, i + 24), f)
                store_i8(q, i, pack_i8(q0, q1, q2, q3))
