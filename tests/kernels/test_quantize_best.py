"""The exact minimum of a block's error: against the fit, and against trying every set of levels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krafla_cli.quant.blocks import WeightError
from krafla_cli.quant.matrix import quantize
from krafla_cli.quant.q4_0 import levels_of
from tests.kernels.test_quantize import IMPORTANCES, MATRICES

LEVELS = np.arange(-8, 8)


def element_weights(w: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """float64 weights of the elements; a block whose weights are all zero counts all alike."""
    x = w.astype(np.float64)
    if importance is None:
        return x * x
    weights = importance.astype(np.float64) * np.sqrt((x * x).mean(axis=1, keepdims=True) + x * x)
    blocks = weights.reshape(-1, 32)
    blocks[~blocks.any(axis=1)] = 1
    return blocks.reshape(w.shape)


def block_errors(w: np.ndarray, result, weights: np.ndarray) -> np.ndarray:
    """The weighted squared error of each block, float64, from the exact products of level and scale."""
    rows, cols = w.shape
    restored = levels_of(result.q, rows, cols) * result.d.astype(np.float64).repeat(32, axis=1)
    return (weights * (w.astype(np.float64) - restored) ** 2).reshape(-1, 32).sum(axis=1)


def assert_not_worse(w, scale_f16, importance):
    try:
        fit = quantize(w, "q4_0", scale_f16, "fit", importance)
    except WeightError:
        with pytest.raises(WeightError):
            quantize(w, "q4_0", scale_f16, "best", importance)
        return
    best = quantize(w, "q4_0", scale_f16, "best", importance)
    weights = element_weights(w, importance)
    fit_errors, best_errors = (block_errors(w, r, weights) for r in (fit, best))
    # The kernel's weights are float32 when there is an importance.
    assert (best_errors <= fit_errors * (1 + (1e-12 if importance is None else 1e-5))).all()


@pytest.mark.parametrize("scale_f16", [True, False])
@given(w=MATRICES)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_best_is_never_worse_than_fit(scale_f16, w):
    assert_not_worse(w, scale_f16, None)


@pytest.mark.parametrize("scale_f16", [True, False])
@given(w=MATRICES, importance=IMPORTANCES)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_best_is_never_worse_than_fit_by_importance(scale_f16, w, importance):
    assert_not_worse(w, scale_f16, importance)


def least_error(values: list[float], counts: list[int], scale_f16: bool) -> float:
    """The least error over every choice of a level for each distinct value: equal values have equal best levels."""
    x = np.array(values, np.float32).astype(np.float64)
    w = x * x * counts
    levels = np.array(list(itertools.product(LEVELS, repeat=len(values))), np.float64)
    sum_xl, sum_ll = (w * x * levels).sum(axis=1), (w * levels**2).sum(axis=1)
    d = np.where(sum_ll > 0, sum_xl / np.where(sum_ll > 0, sum_ll, 1), 0)
    d = d.astype(np.float16 if scale_f16 else np.float32).astype(np.float64)
    return float((w * (x - d[:, None] * levels) ** 2).sum(axis=1).min())


@pytest.mark.parametrize("scale_f16", [True, False])
@given(
    values=st.lists(st.floats(-4, 4, width=32).filter(lambda v: abs(v) > 1e-3), min_size=3, max_size=3),
    counts=st.lists(st.integers(1, 10), min_size=3, max_size=3),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_best_equals_brute_force_on_blocks_of_three_values(scale_f16, values, counts):
    block = np.repeat(np.array(values, np.float32), counts)
    w = np.zeros((1, 32), np.float32)
    w[0, : block.size] = block
    result = quantize(w, "q4_0", scale_f16, "best")
    error = block_errors(w, result, element_weights(w, None))[0]
    scale = float((element_weights(w, None) * w.astype(np.float64) ** 2).sum())
    assert error == pytest.approx(least_error(values, counts, scale_f16), rel=1e-9, abs=1e-14 * scale)


def every_step_error(x: np.ndarray, weights: np.ndarray, scale_f16: bool) -> float:
    """The least error of a block over the levels between any two steps, computed anew for each of them."""
    steps = np.unique([(k + 0.5) / abs(v) for v in x for k in range(8)])
    between = np.concatenate([[steps[0] / 2], (steps[1:] + steps[:-1]) / 2, [steps[-1] * 2]])
    levels = np.clip(np.rint(np.outer(np.concatenate([between, -between]), x)), -8, 7)
    sum_xl, sum_ll = (weights * x * levels).sum(axis=1), (weights * levels**2).sum(axis=1)
    d = np.where(sum_ll > 0, sum_xl / np.where(sum_ll > 0, sum_ll, 1), 0)
    d = d.astype(np.float16 if scale_f16 else np.float32).astype(np.float64)
    return float((weights * (x - d[:, None] * levels) ** 2).sum(axis=1).min())


@pytest.mark.parametrize("scale_f16", [True, False])
@pytest.mark.parametrize("with_importance", [False, True])
def test_best_equals_a_search_over_all_steps(scale_f16, with_importance):
    rng = np.random.default_rng(7)
    w = rng.standard_normal((67, 96)).astype(np.float32)  # 8 tiles and three rows
    importance = rng.lognormal(0, 1, 96).astype(np.float32) if with_importance else None
    weights = element_weights(w, importance)
    errors = block_errors(w, quantize(w, "q4_0", scale_f16, "best", importance), weights)
    expected = [
        every_step_error(x, v, scale_f16)
        for x, v in zip(w.astype(np.float64).reshape(-1, 32), weights.reshape(-1, 32), strict=True)
    ]
    np.testing.assert_allclose(errors, expected, rtol=1e-9)


def test_best_finds_what_no_candidate_of_the_fit_has():
    # Exact with the largest magnitude at level 5; those of the fit are -6 to -8.4.
    w = np.zeros((1, 32), np.float32)
    w[0, :5] = [5.5, -2.2, 3.3, -4.4, 1.1]
    weights = element_weights(w, None)
    fit, best = (block_errors(w, quantize(w, "q4_0", False, rule), weights)[0] for rule in ("fit", "best"))
    assert best < 1e-6 * fit
