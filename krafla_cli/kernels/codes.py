"""The activation quantizer of the specification ("Quantization rule"), one block of 32 at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import (
    copysign,
    largest_magnitude,
    load_f32,
    maximum,
    minimum,
    pack_i8,
    spread_f32,
    store_i8,
    sum_i32,
    truncate,
)
from krafla_cli.kernels.simd_types import F32x8, I32x8, Operands, Pointer

BLOCK = 32
_TINY = np.float32(1e-30)  # 127 / amax would overflow below it
_LARGEST_FLOAT = np.float32(3.4028235e38)


@inline
def quantize_block(values: Pointer, i: int, a: Operands, block: int, step: Operands) -> None:
    """Codes of values[i : i + 32] as block ``block`` of a.codes, a.dx, a.sx.

    The first value that is NaN or infinite is recorded in step.fault: 1 + a.place, its index in ``values``, if NaN.
    """
    v0 = load_f32(values, i)
    v1 = load_f32(values, i + 8)
    v2 = load_f32(values, i + 16)
    v3 = load_f32(values, i + 24)
    amax = largest_magnitude(v0, v1, v2, v3)
    d = np.float32(0)
    inverse = np.float32(0)
    if not amax <= _LARGEST_FLOAT:
        _record_fault(values, i, a, step)
    elif amax >= _TINY:
        d = amax / np.float32(127)
        inverse = np.float32(127) / amax
    q0 = _levels(v0, inverse)
    q1 = _levels(v1, inverse)
    q2 = _levels(v2, inverse)
    q3 = _levels(v3, inverse)
    store_i8(a.codes, block * BLOCK, pack_i8(q0, q1, q2, q3))
    a.dx[block] = d
    a.sx[block] = np.int16(-4 * sum_i32((q0 + q1) + (q2 + q3)))


@inline
def _levels(x: F32x8, inverse: Any) -> I32x8:
    """trunc(x · inverse + copysign(0.5, x)), limited to ±127."""
    level = x * spread_f32(inverse) + copysign(spread_f32(0.5), x)
    return truncate(maximum(minimum(level, spread_f32(127.0)), spread_f32(-127.0)))


@inline
def _record_fault(values: Pointer, i: int, a: Operands, step: Operands) -> None:
    if step.fault[0] == 0:
        j = i
        while abs(values[j]) <= _LARGEST_FLOAT:
            j += 1
        step.fault[0] = 1 + a.place
        step.fault[1] = j
        step.fault[2] = np.int64(values[j] != values[j])
