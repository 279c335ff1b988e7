"""Heads and attention against float64: groups, windows, caps, chunks, rests of every size; equal bits for any split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from krafla_cli.kernels import operations as ops
from krafla_cli.kernels.operations import CHUNK
from tests.kernels.steps import run

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """A layer's attention."""

    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    window: int = 0
    softcap: float = 0.0
    kv: str = "f32"
    rot_dim: int = 16
    has_bias: int = 0
    has_norm: int = 0


class Layer:
    """One layer with its cache; :meth:`step` runs positions through PREPARE_HEADS, ATTEND and MERGE_CHUNKS."""

    def __init__(self, case: Case, n_ctx: int, seed: int = 0) -> None:
        self.case, c = case, case
        rng = np.random.default_rng(seed)
        self.n_ctx = -(-n_ctx // CHUNK) * CHUNK
        dtype = np.uint16 if c.kv == "f16" else np.float32
        padded = -(-c.head_dim // 8) * 8
        self.keys = np.zeros(c.n_kv_heads * self.n_ctx * c.head_dim, dtype)
        self.values = np.zeros(c.n_kv_heads * self.n_ctx * padded, dtype)
        self.parts = np.zeros((self.n_ctx // CHUNK, c.n_heads, 8 + padded), np.float32)
        angles = np.arange(self.n_ctx)[:, None] * 100.0 ** (-np.arange(c.rot_dim // 2) / max(c.rot_dim // 2, 1))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        sizes = {"q": c.n_heads, "k": c.n_kv_heads, "v": c.n_kv_heads}
        self.bias = {x: rng.standard_normal(n * c.head_dim).astype(np.float32) for x, n in sizes.items()}
        self.norm = {x: rng.random(c.head_dim, np.float32) + 0.5 for x in "qk"}

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, n_threads: int = 1) -> np.ndarray:
        c, n = self.case, len(q)
        q, k, v = q.copy(), k.copy(), v.copy()
        cache: dict[str, Any] = {"keys": self.keys, "values": self.values, "n_ctx": self.n_ctx}
        sizes = {"n_heads": c.n_heads, "n_kv_heads": c.n_kv_heads, "head_dim": c.head_dim}
        heads = {f"{x}_bias": b for x, b in self.bias.items()} | {f"{x}_norm": w for x, w in self.norm.items()}
        rope = {"rot_dim": c.rot_dim, "cos": self.cos, "sin": self.sin}
        flags = {"has_bias": c.has_bias, "has_norm": c.has_norm, "eps": EPS, "is_f16": c.kv == "f16"}
        run(
            ops.PREPARE_HEADS,
            ops.HEADS,
            n,
            position,
            n_threads,
            q=q,
            k=k,
            v=v,
            **cache,
            **sizes,
            **heads,
            **rope,
            **flags,
        )
        out = np.full(q.shape, np.nan, np.float32)
        operands = {"q": q, "out": out, "parts": self.parts, "item_bytes": self.keys.itemsize, "window": c.window}
        operands |= {"scale": c.head_dim**-0.5, "softcap": c.softcap, **cache, **sizes}
        run(ops.ATTEND[c.kv], ops.ATTENTION, n, position, n_threads, **operands)
        if n == 1:
            run(ops.MERGE_CHUNKS, ops.ATTENTION, n, position, n_threads, **operands)
        return out

    def expected(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """All positions at once, in float64."""
        c = self.case
        q, k, v = (self._prepared(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        if c.kv == "f16":
            k, v = (x.astype(np.float16).astype(np.float64) for x in (k, v))
        group = c.n_heads // c.n_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) * c.head_dim**-0.5
        if c.softcap:
            scores = c.softcap * np.tanh(scores / c.softcap)
        t, s = np.arange(len(q))[:, None], np.arange(len(q))
        visible = (s <= t) & ((s > t - c.window) if c.window else True)
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)

    def _prepared(self, x: np.ndarray, name: str) -> np.ndarray:
        c = self.case
        x = x.astype(np.float64)
        if c.has_bias:
            x = x + self.bias[name].reshape(-1, c.head_dim)
        if name == "v":
            return x
        if c.has_norm:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * self.norm[name]
        even, odd = x[..., 0 : c.rot_dim : 2], x[..., 1 : c.rot_dim : 2]
        cos, sin = self.cos[: len(x), None].astype(np.float64), self.sin[: len(x), None].astype(np.float64)
        turned = np.stack((even * cos - odd * sin, even * sin + odd * cos), -1).reshape(*x.shape[:2], c.rot_dim)
        return np.concatenate((turned, x[..., c.rot_dim :]), -1)


def _inputs(case: Case, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    heads = (case.n_heads, case.n_kv_heads, case.n_kv_heads)
    return [rng.standard_normal((n, h, case.head_dim)).astype(np.float32) for h in heads]


def _run(case: Case, n: int, sizes: list[int], n_threads: int = 1) -> np.ndarray:
    layer, inputs = Layer(case, n), _inputs(case, n)
    outputs, position = [], 0
    for size in sizes:
        outputs.append(layer.step(*(x[position : position + size] for x in inputs), position, n_threads))
        position += size
    assert position == n
    return np.concatenate(outputs)


CASES = {
    "gqa": Case(),
    "one kv head, 5 rows": Case(n_heads=5, n_kv_heads=1, head_dim=6, rot_dim=4),
    "7 rows": Case(n_heads=14, n_kv_heads=2, head_dim=8, rot_dim=8),
    "9 rows": Case(n_heads=9, n_kv_heads=1, head_dim=20, rot_dim=20),
    "no groups, odd tiles": Case(n_heads=3, n_kv_heads=3, head_dim=40, rot_dim=0),
    "bias and norm": Case(has_bias=1, has_norm=1),
    "window": Case(window=5),
    "window of a chunk": Case(window=CHUNK),
    "cap": Case(softcap=2.0),
    "f16": Case(kv="f16", head_dim=24, rot_dim=24),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    case, n = CASES[name], CHUNK + 40
    got = _run(case, n, [n])
    want = Layer(case, n).expected(*_inputs(case, n))
    # An f16 cache may round a key to its neighbour.
    np.testing.assert_allclose(got, want, rtol=0, atol=(2e-3 if case.kv == "f16" else 3e-6) * np.abs(want).max())


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_for_any_split_and_thread(name: str) -> None:
    case, n = CASES[name], 2 * CHUNK + 20
    whole = _run(case, n, [n])
    np.testing.assert_array_equal(_run(case, n, [n], n_threads=3), whole)
    np.testing.assert_array_equal(_run(case, n, [1, 7, 100, 148, 1, 200, *[1] * 75]), whole)


def test_numbers_beyond_f16_become_its_largest() -> None:
    case = Case(n_heads=1, n_kv_heads=1, head_dim=8, rot_dim=0, kv="f16")
    layer = Layer(case, 1)
    x = np.full((1, 1, 8), 1e6, np.float32)
    x[..., 1::2] *= -1
    out = layer.step(x, x, x, 0)
    np.testing.assert_array_equal(out[0, 0], [65504, -65504] * 4)
