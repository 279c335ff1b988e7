"""Elementary functions of 8 float32 values, the same bits on every machine with fused multiply-add.

Their relative error stays below 2e-7 (exp, sigmoid, tanh) over the range that activations have.
"""

from __future__ import annotations

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import (
    absolute,
    copysign,
    fma,
    from_bits,
    maximum,
    minimum,
    select,
    spread_f32,
    truncate,
    zero_f32,
)
from krafla_cli.kernels.simd_types import F32x8

# exp(x) overflows above, and is taken as 2^-126 below.
_EXP_MAX = 88.37
_EXP_MIN = -87.33
_LOG2_E = 1.4426950408889634
# ln 2 in two parts, the first with few bits, so that n · ln 2 loses nothing.
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_ROUNDER = 12582912.0  # 1.5 · 2^23: adding it rounds to a whole number
_SQRT_2_OVER_PI = 0.7978845608028654


@inline
def exp(x: F32x8) -> F32x8:
    """2^n times a polynomial of the rest, |rest| <= ln 2 / 2 (Cephes' coefficients); 2^126 from 88.37 on."""
    return exp_of_negative(minimum(x, spread_f32(_EXP_MAX)))


@inline
def exp_of_negative(x: F32x8) -> F32x8:
    """exp(x) for x up to 88."""
    x = maximum(x, spread_f32(_EXP_MIN))
    n = fma(x, spread_f32(_LOG2_E), spread_f32(_ROUNDER)) - _ROUNDER
    r = fma(n, spread_f32(-_LN2_HIGH), x)
    r = fma(n, spread_f32(-_LN2_LOW), r)
    p = spread_f32(1.9875691500e-4)
    p = fma(p, r, spread_f32(1.3981999507e-3))
    p = fma(p, r, spread_f32(8.3334519073e-3))
    p = fma(p, r, spread_f32(4.1665795894e-2))
    p = fma(p, r, spread_f32(1.6666665459e-1))
    p = fma(p, r, spread_f32(5.0000001201e-1))
    p = fma(p, r * r, r) + 1.0
    return p * from_bits((truncate(n) + 127) << 23)


@inline
def sigmoid(x: F32x8) -> F32x8:
    return 1.0 / (exp(zero_f32() - x) + 1.0)


@inline
def silu(x: F32x8) -> F32x8:
    """x · sigmoid(x)."""
    return x / (exp(zero_f32() - x) + 1.0)


@inline
def gelu_tanh(x: F32x8) -> F32x8:
    """x/2 · (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3), which is x · sigmoid(2 u)."""
    u = x * fma(x * x, spread_f32(0.044715 * _SQRT_2_OVER_PI), spread_f32(_SQRT_2_OVER_PI))
    return x / (exp(u * -2.0) + 1.0)


@inline
def gelu(x: F32x8) -> F32x8:
    """x/2 · (1 + erf(x / sqrt 2)) as max(x, 0) - |x| Φ(-|x|), Φ(-a) = exp(-polynomial in a); within 3e-7; NaN stays.

    The polynomial was fitted for this file to -ln(erfc(a / sqrt 2) / 2): iteratively reweighted least squares (Lawson)
    on 1200 Chebyshev nodes of [0, 5.8], weighted by the error that it makes in gelu.
    """
    a = minimum(absolute(x), spread_f32(11.0))  # there the polynomial is 111, and what is taken away nothing
    p = spread_f32(1.1717688771464728e-06)
    p = fma(p, a, spread_f32(-1.7387261301070948e-05))
    p = fma(p, a, spread_f32(7.934343029036383e-05))
    p = fma(p, a, spread_f32(0.00022411400189756138))
    p = fma(p, a, spread_f32(-0.005083101212036737))
    p = fma(p, a, spread_f32(0.0365386879447535))
    p = fma(p, a, spread_f32(0.31823457516581194))
    p = fma(p, a, spread_f32(0.7978978431746766))
    p = fma(p, a, spread_f32(0.6931464000764759))
    return maximum(zero_f32(), x) - a * exp_of_negative(zero_f32() - p)


@inline
def tanh(x: F32x8) -> F32x8:
    """1 - 2 / (exp(2 |x|) + 1) with the sign of x; near 0, where that cancels, a polynomial (Cephes)."""
    size = absolute(x)
    far = copysign(1.0 - 2.0 / (exp(size + size) + 1.0), x)
    z = x * x
    p = spread_f32(-5.70498872745e-3)
    p = fma(p, z, spread_f32(2.06390887954e-2))
    p = fma(p, z, spread_f32(-5.37397155531e-2))
    p = fma(p, z, spread_f32(1.33314422036e-1))
    p = fma(p, z, spread_f32(-3.33332819422e-1))
    near = fma(p * z, x, x)
    return select(size < 0.625, near, far)


@inline
def soft_cap(x: F32x8, cap: float) -> F32x8:
    """cap · tanh(x / cap); ``x`` where cap is 0."""
    if cap == 0.0:
        return x
    return tanh(x / cap) * cap
