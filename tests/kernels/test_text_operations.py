"""The operations of LEMB's forward pass against hand-computed values, NumPy and float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from krafla_cli.formats.lemb_codes import pack_int4, pack_ternary
from krafla_cli.kernels import text_operations as ops
from krafla_cli.kernels.native import Native
from krafla_cli.kernels.structs import Struct
from krafla_cli.kernels.team import Call, Program, Team
from krafla_cli.kernels.text_operations import padded, padded_vector

RNG = np.random.default_rng(0)


def run(native: Native, layout: Struct, n_tokens: int, starts: Any = (0,), n_threads: int = 1, **operands: Any) -> None:
    """Runs an operation; the results are in its operands. ``ids`` count from 0."""
    starts, ids = np.array(starts, np.int64), np.arange(n_tokens)
    batch = ops.BATCH.pack(n_tokens=n_tokens, n_texts=len(starts) - 1, ids=ids, starts=starts)
    Team(n_threads, 1 << 18).run(Program([Call(native, layout.pack(**operands))]), batch)


def rows(values: Any, stride: int | None = None) -> np.ndarray:
    """``values`` with zeros behind them, in room for vector reads and rows taken by four."""
    values = np.atleast_2d(np.asarray(values, np.float32))
    out = np.zeros((-(-len(values) // 4) * 4 + 1, stride or padded(values.shape[1])), np.float32)
    out[: len(values), : values.shape[1]] = values
    return out


def prepared(values: Any, before: int = ops.PLAIN, **norm: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the kernel makes of ``values`` [T, n]: out [T, stride], codes [T, n], x_scale [T]."""
    values = np.atleast_2d(np.asarray(values, np.float32))
    n_rows, n = values.shape
    x, stride = rows(values), padded(n)
    codes, x_scale = np.zeros((n_rows, stride), np.uint8), np.zeros(n_rows, np.float32)
    norm = {k: padded_vector(np.asarray(v, np.float32), stride) for k, v in norm.items()}
    numbers = {"n_cols": n, "stride": stride, "quantize": 1, "before": before}
    run(ops.PREPARE, ops.INPUT, n_rows, x=x, out=x, codes=codes, x_scale=x_scale, **numbers, **norm)
    return x[:n_rows], codes[:, :n].astype(int) - 128, x_scale


def test_layer_norm_by_hand() -> None:
    # mean 2, biased variance 2/3
    unit = 1 / math.sqrt(2 / 3 + 1e-5)
    out, _, _ = prepared([1, 2, 3], ops.NORM, weight=[2, 2, 2], bias=[1, 1, 1])
    assert np.allclose(out[0, :3], [1 - 2 * unit, 1, 1 + 2 * unit], atol=1e-6)
    assert not out[0, 3:].any()


def test_activations_are_scaled_by_128_and_clamped_to_127() -> None:
    # LayerNorm of [-1, 0, 1, 0] is +-1.4141 and 0; the largest becomes 128 and is clamped to 127, the smallest is -128.
    _, codes, x_scale = prepared([-1, 0, 1, 0])
    assert codes.tolist() == [[-128, 0, 127, 0]]
    assert x_scale[0] == pytest.approx(128 / 1.41420, rel=1e-4)


def test_constant_rows_hit_the_clamp_and_stay_zero() -> None:
    _, codes, x_scale = prepared([3, 3, 3, 3])
    assert codes.tolist() == [[0, 0, 0, 0]]
    assert x_scale[0] == np.float32(128) / np.float32(1e-5)


@pytest.mark.parametrize("n", [1, 4, 7, 8, 12, 20, 31, 32, 36, 100, 256])
def test_codes_against_float64(n: int) -> None:
    """The formula in float64: equal, but where a value is within rounding of a tie; a scale within 1e-5."""
    values = (RNG.standard_normal((37, n)) + RNG.standard_normal((37, 1))) * 10.0 ** RNG.integers(-3, 4, (37, 1))
    values = values.astype(np.float32).astype(np.float64)
    unit = (values - values.mean(1, keepdims=True)) / np.sqrt(values.var(1, keepdims=True) + 1e-5)
    scale = 128 / np.maximum(np.abs(unit).max(1, keepdims=True), 1e-5)
    level = unit * scale
    _, codes, x_scale = prepared(values)
    expected = np.clip(np.rint(level), -128, 127)
    near_tie = np.abs(np.abs(level - np.trunc(level)) - 0.5) < 1e-3
    assert np.array_equal(codes[~near_tie], expected[~near_tie])
    assert np.abs(codes - expected).max() <= 1
    assert np.allclose(x_scale, scale[:, 0], rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_rows_that_are_not_finite_do_not_become_finite(value: float) -> None:
    values = np.zeros((3, 40), np.float32)
    values[1, ::2] = value
    values[2] = np.arange(40)
    _, codes, x_scale = prepared(values)
    assert np.isnan(x_scale[1])
    assert np.isfinite(x_scale[[0, 2]]).all()
    assert codes[2, 0] == -128


def test_gelu_is_the_exact_form_to_float32_rounding() -> None:
    x = np.linspace(-12, 12, 20001).astype(np.float32)
    exact = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64).tolist()])
    got = prepared(x, ops.GELU)[0][0, : len(x)]
    assert np.abs(got - exact).max() <= 5e-7
    assert np.abs(got - exact)[np.abs(x) < 1].max() <= 1e-7
    tanh_form = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert np.abs(tanh_form - exact).max() > 1e-4


def test_gelu_far_out() -> None:
    x = np.array([-3e38, -1e4, -0.0, 0.0, 1e4, 3e38], np.float32)
    assert np.abs(prepared(x, ops.GELU)[0][0, :6] - np.maximum(x, 0)).max() <= 1e-20
    assert np.isnan(prepared([np.nan, 1], ops.GELU)[0][0, 0])


# --- products


def ternary(weights: np.ndarray, codes: np.ndarray, bias: Any = None, add_to: Any = None, **numbers: Any) -> np.ndarray:
    """(codes Wt + bias) / (scale · x_scale) by the kernel: [T, rows]."""
    n_tokens, n_cols = codes.shape
    stride, x_stride = padded(len(weights)), padded(n_cols)
    tiles, offset = ops.ternary_tiles(pack_ternary(weights.astype(np.int8)), stride)
    unsigned = np.full((-(-n_tokens // 4) * 4, x_stride), 7, np.uint8)
    unsigned[:n_tokens, :n_cols] = codes + 128
    x_scale = np.full(n_tokens, numbers.pop("x_scale", 1.0), np.float32)
    y = rows(np.zeros((n_tokens, len(weights))) if add_to is None else add_to)
    run(
        ops.TERNARY_PRODUCT,
        ops.TERNARY,
        n_tokens,
        q=tiles,
        n_groups=n_cols // 4,
        n_tiles=len(tiles),
        offset=offset,
        bias=padded_vector(bias, stride),
        scale=numbers.pop("scale", 1.0),
        codes=unsigned,
        x_stride=x_stride,
        x_scale=x_scale,
        y=y,
        y_stride=y.shape[1],
        add=add_to is not None,
        **numbers,
    )
    assert not y[:n_tokens, len(weights) :].any()
    return y[:n_tokens, : len(weights)]


def test_the_bias_is_added_before_the_rescale() -> None:
    weights, codes = np.array([[1, 0, -1, 0]]), np.array([[100, 5, 20, 7]])
    bias = np.array([10], np.float32)
    # (100 - 20 + 10) / (2 * 4)
    assert ternary(weights, codes, bias, scale=2.0, x_scale=4.0).tolist() == [[11.25]]
    assert ternary(weights, codes, bias, add_to=[[1]], scale=2.0, x_scale=4.0).tolist() == [[12.25]]


@pytest.mark.parametrize(("n_rows", "n_cols", "n_tokens"), [(1, 4, 1), (16, 256, 4), (17, 260, 5), (40, 1036, 9)])
def test_ternary_sums_are_exact(n_rows: int, n_cols: int, n_tokens: int) -> None:
    weights, codes = RNG.integers(-1, 2, (n_rows, n_cols)), RNG.integers(-128, 128, (n_tokens, n_cols))
    assert np.array_equal(ternary(weights, codes), codes @ weights.T)


@pytest.mark.parametrize("n_cols", [252, 256, 260, 65532])
@pytest.mark.parametrize("code", [-128, 127])
def test_sums_at_their_limits(n_cols: int, code: int) -> None:
    """All weights and codes at the ends of their ranges, at the width where 16-bit sums are full and at the largest."""
    weights = np.stack([np.ones(n_cols, np.int8), -np.ones(n_cols, np.int8)])
    assert ternary(weights, np.full((1, n_cols), code)).tolist() == [[code * n_cols, -code * n_cols]]


@pytest.mark.parametrize(("n_rows", "n_cols", "n_tokens"), [(1, 1, 1), (16, 256, 4), (17, 13, 5), (384, 100, 3)])
@pytest.mark.parametrize("over_texts", [0, 1])
def test_dense_products(n_rows: int, n_cols: int, n_tokens: int, over_texts: int) -> None:
    weights, x = RNG.standard_normal((n_rows, n_cols)), RNG.standard_normal((n_tokens, n_cols))
    bias = RNG.standard_normal(n_rows).astype(np.float32)
    source, stride = rows(x), padded(n_rows)
    tiles = ops.dense_tiles(weights.astype(np.float32), stride)
    y = np.ones((-(-n_tokens // 4) * 4 + 1, stride), np.float32)
    numbers = {"n_cols": n_cols, "n_tiles": len(tiles), "y_stride": stride, "add": 1, "over_texts": over_texts}
    starts = np.zeros(n_tokens + 1) if over_texts else (0,)
    arrays = {"w": tiles, "bias": padded_vector(bias, stride), "x": source, "y": y}
    run(
        ops.DENSE_PRODUCT,
        ops.DENSE,
        0 if over_texts else n_tokens,
        starts,
        x_stride=source.shape[1],
        **arrays,
        **numbers,
    )
    assert np.allclose(y[:n_tokens, :n_rows], 1 + x @ weights.T + bias, atol=1e-4)
    assert (y[:n_tokens, n_rows:] == 1).all()


# --- rows, attention, pooling


@pytest.mark.parametrize("n_cols", [8, 12, 40])
@pytest.mark.parametrize("encoding", ops.ENCODINGS)
def test_embedding_rows(encoding: str, n_cols: int) -> None:
    codes = {
        "fp32": RNG.standard_normal((9, n_cols)).astype(np.float32),
        "int8": RNG.integers(-128, 128, (9, n_cols)).astype(np.int8),
        "int4": RNG.integers(-8, 8, (9, n_cols)).astype(np.int8),
        "ternary": RNG.integers(-1, 2, (9, n_cols)).astype(np.int8),
    }[encoding]
    stored = {"int4": pack_int4, "ternary": pack_ternary}.get(encoding, lambda c: c)(codes)
    table = np.concatenate([stored.view(np.uint8).reshape(-1), np.zeros(32, np.uint8)])
    scales = RNG.standard_normal(9).astype(np.float32)
    x = np.ones((9, padded(n_cols)), np.float32)
    numbers = {"encoding": ops.ENCODINGS[encoding], "n_cols": n_cols, "stride": x.shape[1]}
    run(ops.LOOK_UP, ops.TABLE, 9, rows=table, row_bytes=stored.strides[0], scales=scales, x=x, **numbers)
    assert np.array_equal(x[:, :n_cols], codes if encoding == "fp32" else codes * scales[:, None])
    assert not x[:, n_cols:].any()


@pytest.mark.parametrize(("n_heads", "head_dim"), [(4, 64), (1, 4), (3, 1), (2, 36), (5, 12)])
def test_attention(n_heads: int, head_dim: int) -> None:
    starts, d, stride = [0, 1, 3, 20, 61], n_heads * head_dim, padded(n_heads * head_dim)
    qkv = rows(np.zeros((61, 3 * stride)), 3 * stride)
    values = RNG.standard_normal((3, 61, d)).astype(np.float32)
    for part in range(3):
        qkv[:61, part * stride : part * stride + d] = values[part]
    out = np.zeros((61, stride), np.float32)
    numbers = {"n_heads": n_heads, "head_dim": head_dim, "stride": stride, "scale": 0.3}
    run(ops.ATTEND, ops.ATTENTION, 61, starts, n_threads=2, qkv=qkv, out=out, **numbers)
    for start, end in pairwise(starts):
        q, k, v = values[:, start:end].reshape(3, end - start, n_heads, head_dim).astype(np.float64)
        scores = np.exp(0.3 * np.einsum("ihd,jhd->hij", q, k))
        expected = np.einsum("hij,jhd->ihd", scores / scores.sum(2, keepdims=True), v).reshape(-1, d)
        assert np.allclose(out[start:end, :d], expected, atol=2e-6)


def test_attention_to_large_scores_and_to_none() -> None:
    """Scores 1000 and 1000, then -1000 and 0, as a softmax must survive them; NaN where a score is not finite."""
    qkv = np.zeros((5, 96), np.float32)
    qkv[:2, 0], qkv[:2, 32], qkv[:2, 64] = [1000, 1], [1, 1], [2, 4]
    out = np.zeros((2, 32), np.float32)
    operands = {"qkv": qkv, "out": out, "n_heads": 1, "head_dim": 1, "stride": 32, "scale": 1}
    run(ops.ATTEND, ops.ATTENTION, 2, [0, 2], **operands)
    assert out[:, 0].tolist() == [3, 3]
    qkv[:2, 0], qkv[:2, 32] = 1, [-1000, 0]
    run(ops.ATTEND, ops.ATTENTION, 2, [0, 2], **operands)
    assert out[:, 0].tolist() == [4, 4]
    qkv[1, 32] = np.inf
    run(ops.ATTEND, ops.ATTENTION, 2, [0, 2], **operands)
    assert np.isnan(out[:, 0]).all()


def test_pooling_is_the_mean_of_norms() -> None:
    x, weight, bias = RNG.standard_normal((7, 20)), RNG.standard_normal(20), RNG.standard_normal(20)
    out = np.zeros((2, 32), np.float32)
    norm = {"weight": padded_vector(weight.astype(np.float32), 32), "bias": padded_vector(bias.astype(np.float32), 32)}
    run(ops.POOL, ops.POOLING, 7, [0, 2, 7], x=rows(x), out=out, n_cols=20, stride=32, **norm)
    unit = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * weight + bias
    assert np.allclose(out[:, :20], [unit[:2].mean(0), unit[2:].mean(0)], atol=1e-5)
    assert not out[:, 20:].any()
