"""RMS norms, with what follows them: the codes of the result, or a residual sum."""

from __future__ import annotations

import numpy as np

from krafla_cli.kernels.codes import BLOCK, quantize_block
from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import advance, fma, load_f32, spread_f32, store_f32, sum_f32, zero_f32
from krafla_cli.kernels.simd_types import Operands, Pointer
from krafla_cli.kernels.threads import next_unit


@inline
def sum_of_squares(x: Pointer, n: int) -> float:
    """Σ x² of ``n`` values: four vectors of partial sums, then one, then the rest one by one."""
    s0 = s1 = s2 = s3 = zero_f32()
    n_32 = n // 32 * 32
    for i in range(0, n_32, 32):
        v = load_f32(x, i)
        s0 = fma(v, v, s0)
        v = load_f32(x, i + 8)
        s1 = fma(v, v, s1)
        v = load_f32(x, i + 16)
        s2 = fma(v, v, s2)
        v = load_f32(x, i + 24)
        s3 = fma(v, v, s3)
    n_8 = n // 8 * 8
    for i in range(n_32, n_8, 8):
        v = load_f32(x, i)
        s0 = fma(v, v, s0)
    total = sum_f32((s0 + s1) + (s2 + s3))
    for i in range(n_8, n):
        total += x[i] * x[i]
    return total


@inline
def inverse_rms(x: Pointer, n: int, eps: float) -> float:
    """1 / sqrt(mean(x²) + eps), float32."""
    mean = sum_of_squares(x, n) / np.float32(n)
    return np.float32(1) / np.sqrt(mean + np.float32(eps))


def norm_quantize(a: Operands, step: Operands, me: Operands) -> None:
    """Operation NORM_QUANTIZE."""
    n = a.n_cols
    t = next_unit(me, 1)
    while t < step.n_tokens:
        x = advance(a.x, t * n)
        out = advance(a.out, t * n)
        scale = spread_f32(inverse_rms(x, n, a.eps))
        for i in range(0, n, 8):
            store_f32(out, i, load_f32(x, i) * scale * load_f32(a.weight, i))
        for block in range(n // BLOCK):
            quantize_block(a.out, t * n + block * BLOCK, a, t * (n // BLOCK) + block, step)
        t = next_unit(me, 1)


def norm_add(a: Operands, step: Operands, me: Operands) -> None:
    """Operation NORM_ADD."""
    n = a.n_cols
    t = next_unit(me, 1)
    while t < step.n_tokens:
        x = advance(a.x, t * n)
        y = advance(a.y, t * n)
        scale = spread_f32(inverse_rms(y, n, a.eps))
        for i in range(0, n, 8):
            store_f32(x, i, load_f32(x, i) + load_f32(y, i) * scale * load_f32(a.weight, i))
        t = next_unit(me, 1)
