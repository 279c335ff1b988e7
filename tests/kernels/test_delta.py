"""The gated delta rule against float64, step by step as the specification numbers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from krafla_cli.kernels import operations as ops
from tests.kernels.steps import run


@dataclass(frozen=True)
class Case:
    """Sizes of a linear-attention layer."""

    k_heads: int = 2
    v_heads: int = 4
    k_dim: int = 8
    v_dim: int = 16
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


CASES = [Case(), Case(k_heads=1, v_heads=4, k_dim=6, v_dim=24, taps=3), Case(v_heads=8, k_dim=13, v_dim=12, taps=1)]


class Layer:
    """Random weights and a state at position 0."""

    def __init__(self, case: Case) -> None:
        self.case, rng = case, np.random.default_rng(0)
        self.taps = rng.standard_normal((case.taps, case.channels)).astype(np.float32)
        self.dt_bias, self.a_log = rng.standard_normal((2, case.v_heads)).astype(np.float32)
        self.weight = rng.random(case.v_dim, np.float32) + 0.5
        self.recent = np.zeros((case.taps - 1, case.channels), np.float32)
        self.memory = np.zeros((case.v_heads, -(-case.v_dim // 8), case.k_dim, 8), np.float32)

    def step(self, x: np.ndarray, z: np.ndarray, b: np.ndarray, a: np.ndarray, n_threads: int = 1) -> np.ndarray:
        c, n = self.case, len(x)
        x, z = np.ascontiguousarray(x), np.ascontiguousarray(z)
        convolved, beta, decay = np.zeros_like(x), b.copy(), a.copy()
        out = np.zeros((n, c.v_heads, c.v_dim), np.float32)
        sizes: dict[str, Any] = {"n_channels": c.channels, "n_k_heads": c.k_heads, "n_v_heads": c.v_heads}
        sizes["k_dim"] = c.k_dim
        taps = {"taps": self.taps, "recent": self.recent, "n_channels": c.channels, "n_taps": c.taps}
        run(ops.CONVOLVE, ops.CONVOLUTION, n, 0, n_threads, x=x, out=convolved, **taps)
        gates = {"dt_bias": self.dt_bias, "a_log": self.a_log, "query_scale": c.k_dim**-0.5}
        run(ops.NORMALIZE_KEYS, ops.KEYS, n, 0, n_threads, x=convolved, beta=beta, decay=decay, **gates, **sizes)
        state = {"beta": beta, "decay": decay, "memory": self.memory, "v_dim": c.v_dim}
        run(ops.DELTA_RULE, ops.DELTA, n, 0, n_threads, x=convolved, out=out, **state, **sizes)
        norm = {"weight": self.weight, "n_v_heads": c.v_heads, "v_dim": c.v_dim, "eps": 1e-6}
        run(ops.NORM_GATE_HEADS, ops.GATED_HEADS, n, 0, n_threads, x=out, z=z, **norm)
        return out

    def expected(self, x: np.ndarray, z: np.ndarray, b: np.ndarray, a: np.ndarray) -> np.ndarray:
        c = self.case
        x, z, b, a = (v.astype(np.float64) for v in (x, z, b, a))
        padded = np.concatenate((np.zeros((c.taps - 1, c.channels)), x))
        mixed = sum(padded[i : i + len(x)] * self.taps[i] for i in range(c.taps))
        mixed = mixed / (1 + np.exp(-mixed))
        n_keys = c.k_heads * c.k_dim
        q, k = (mixed[:, i * n_keys : (i + 1) * n_keys].reshape(-1, c.k_heads, c.k_dim) for i in (0, 1))
        q, k = (v / np.sqrt((v**2).sum(-1, keepdims=True) + 1e-6) for v in (q, k))
        v = mixed[:, 2 * n_keys :].reshape(-1, c.v_heads, c.v_dim)
        beta, decay = 1 / (1 + np.exp(-b)), np.exp(-np.exp(self.a_log) * np.log1p(np.exp(a + self.dt_bias)))
        out = np.zeros((len(x), c.v_heads, c.v_dim))
        for h in range(c.v_heads):
            head, state = h // (c.v_heads // c.k_heads), np.zeros((c.k_dim, c.v_dim))
            for t in range(len(x)):
                state = state * decay[t, h]
                state = state + np.outer(k[t, head], beta[t, h] * (v[t, h] - state.T @ k[t, head]))
                out[t, h] = state.T @ (q[t, head] * c.k_dim**-0.5)
        normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) * self.weight
        return normed * (z / (1 + np.exp(-z))).reshape(out.shape)


def _inputs(case: Case, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    sizes = (case.channels, case.v_heads * case.v_dim, case.v_heads, case.v_heads)
    return [rng.standard_normal((n, size)).astype(np.float32) for size in sizes]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_delta_rule(case: Case) -> None:
    inputs = _inputs(case, 30)
    got = Layer(case).step(*inputs)
    want = Layer(case).expected(*inputs)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_for_any_split_and_thread(case: Case) -> None:
    inputs = _inputs(case, 30)
    whole = Layer(case).step(*inputs)
    np.testing.assert_array_equal(Layer(case).step(*inputs, n_threads=3), whole)
    layer = Layer(case)
    parts = [layer.step(*(x[i:j] for x in inputs)) for i, j in ((0, 1), (1, 2), (2, 4), (4, 5), (5, 30))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
