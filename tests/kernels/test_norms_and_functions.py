"""Norms and elementary functions against float64."""

from __future__ import annotations

import numpy as np
import pytest

from krafla_cli.kernels import operations as ops
from tests.kernels.steps import Codes, quantized, run

EPS = 1e-6


def _rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("n_cols", [32, 96, 576])
def test_norm_and_codes(n_cols: int) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, n_cols)).astype(np.float32), rng.random(n_cols, np.float32)
    out, codes = np.zeros_like(x), Codes(3, n_cols)
    run(ops.NORM_QUANTIZE, ops.NORM, 3, x=x, weight=weight, out=out, n_cols=n_cols, eps=EPS, **codes.operands)
    np.testing.assert_allclose(out, _rms(x, weight), rtol=1e-6)
    want = quantized(out)
    np.testing.assert_array_equal(codes.codes, want.codes)
    np.testing.assert_array_equal(codes.dx, want.dx)


def test_norm_of_a_residual() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 3, 64)).astype(np.float32)
    weight = rng.random(64, np.float32)
    before = x.copy()
    run(ops.NORM_ADD, ops.NORM_SUM, 3, y=y, weight=weight, x=x, n_cols=64, eps=EPS)
    np.testing.assert_allclose(x, before + _rms(y, weight), rtol=1e-5, atol=1e-6)


# Everything that activations can be, with the ends where exp overflows or vanishes, and the switch of tanh at 0.625.
VALUES = np.concatenate(
    (
        np.linspace(-100, 100, 4001),
        np.linspace(-1, 1, 2001),
        [0.0, -0.0, 1e-20, -1e-20, 0.625, -0.625, 87.3, 88.4, -87.4, -88.4, 500.0, -500.0],
    )
).astype(np.float32)
VALUES = np.resize(VALUES, 6144)


@pytest.mark.parametrize("act", [0, 1])
def test_activation_functions(act: int) -> None:
    gate, up, codes = VALUES.copy(), np.ones_like(VALUES), Codes(1, len(VALUES))
    run(ops.ACTIVATE_QUANTIZE, ops.ACTIVATION, gate=gate, up=up, act=act, n_cols=len(gate), **codes.operands)
    x = VALUES.astype(np.float64)
    # x/2 (1 + tanh u) is x sigmoid(2 u), which loses no digits.
    u = x if act == 0 else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    with np.errstate(over="ignore"):
        want = x / (1 + np.exp(-u))
    # exp's argument is rounded: far from 0 that costs the result some digits.
    np.testing.assert_allclose(gate, want, rtol=1e-5, atol=1e-35)
    near = np.abs(x) < 2
    np.testing.assert_allclose(gate[near], want[near], rtol=4e-7, atol=0)


def test_soft_cap() -> None:
    cap = 30.0
    x = np.concatenate((VALUES, VALUES[:3])).copy()  # a rest of 3 after whole vectors
    want = cap * np.tanh(x.astype(np.float64) / cap)
    run(ops.SOFT_CAP, ops.CAP, x=x, n_cols=len(x), cap=cap)
    np.testing.assert_allclose(x, want, rtol=5e-7, atol=1e-30)
