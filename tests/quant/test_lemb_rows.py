"""Embedding rows and ternary matrices: hand-computed values, the rule restated, and edge values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from krafla_cli.quant.lemb_rows import half_mean_rows, relative_error, symmetric_rows, ternary_rows
from krafla_cli.quant.ternary import absmedian_ternary, lower_median


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_int8_row_by_hand() -> None:
    q = symmetric_rows(f32(1.27, -0.635, 0.005, 0.0)[None], 127)
    assert q.codes.tolist() == [[127, -64, 0, 0]]  # -63.5 and 0.5: halves go to even
    assert q.scales[0] == np.float32(1.27) / np.float32(127)


def test_int4_row_by_hand_never_uses_minus_8() -> None:
    q = symmetric_rows(f32(-7.0, 6.5, 2.5, -3.5)[None], 7)
    assert q.codes.tolist() == [[-7, 6, 2, -4]]
    assert q.scales.tolist() == [1.0]


@pytest.mark.parametrize("max_code", [7, 127])
def test_codes_stay_symmetric_and_errors_within_half_a_step(max_code: int) -> None:
    rows = np.random.default_rng(0).standard_normal((500, 32)).astype(np.float32)
    q = symmetric_rows(rows, max_code)
    assert q.codes.min() == -max_code
    assert q.codes.max() == max_code
    assert np.all(np.abs(q.dequantized() - rows) <= q.scales[:, None] * 0.5001)


@pytest.mark.parametrize("quantize", [lambda r: symmetric_rows(r, 7), lambda r: symmetric_rows(r, 127), ternary_rows])
def test_zero_and_tiny_rows_become_zeros_without_nan(quantize) -> None:
    rows = np.stack([np.zeros(8), np.full(8, 1e-45), np.full(8, 3e-40), np.full(8, 3e38)]).astype(np.float32)
    q = quantize(rows)
    assert np.isfinite(q.scales).all()
    assert not q.codes[0].any()
    assert np.isfinite(q.dequantized()[:3]).all()
    assert np.allclose(q.dequantized()[3], 3e38, rtol=1e-2)


def test_ternary_row_by_hand() -> None:
    # k = 1: 16; k = 2: (4+3)^2/2 = 24.5; k = 3: (7+1)^2/3 = 21.3; k = 4: 64/4 = 16
    q = ternary_rows(f32(1.0, -4.0, 3.0, 0.0)[None])
    assert q.codes.tolist() == [[0, -1, 1, 0]]
    assert q.scales.tolist() == [3.5]


def test_ternary_rows_beat_every_other_choice_of_codes() -> None:
    rows = np.random.default_rng(1).standard_normal((20, 6)).astype(np.float32)
    q = ternary_rows(rows)
    for row, codes, scale in zip(rows.astype(np.float64), q.codes, q.scales, strict=True):
        found = np.square(row - codes * float(scale)).sum()
        best = min(
            np.square(row - t * s).sum()
            for t in map(np.array, itertools.product((-1, 0, 1), repeat=6))
            if t.any()
            for s in [row @ t / (t @ t)]
        )
        assert found <= best * (1 + 1e-6)


def test_least_squares_gains_over_half_the_mean() -> None:
    rows = np.random.default_rng(2).standard_t(3, (300, 64)).astype(np.float32)
    assert relative_error(rows, ternary_rows(rows)) < relative_error(rows, half_mean_rows(rows))


def test_half_mean_by_hand() -> None:
    q = half_mean_rows(f32(4.0, -2.0, 1.0, 1.0)[None])  # mean 2, threshold 1: kept 4 and 2
    assert q.codes.tolist() == [[1, -1, 0, 0]]
    assert q.scales.tolist() == [3.0]


def test_relative_error_of_nothing_is_zero() -> None:
    rows = np.zeros((2, 4), np.float32)
    assert relative_error(rows, ternary_rows(rows)) == 0.0


def test_more_rows_than_a_chunk() -> None:
    rows = np.random.default_rng(3).standard_normal((5000, 4)).astype(np.float32)
    whole = ternary_rows(rows)
    assert np.array_equal(whole.codes[4999:], ternary_rows(rows[4999:]).codes)
    assert np.array_equal(whole.codes[:1], ternary_rows(rows[:1]).codes)


def test_lower_median_is_torchs() -> None:
    import torch

    rng = np.random.default_rng(4)
    for n in (1, 2, 3, 4, 17, 100):
        values = rng.standard_normal(n).astype(np.float32)
        assert lower_median(values) == torch.median(torch.from_numpy(values)).item()


def test_absmedian_by_hand() -> None:
    # |W| sorted: 0.25 0.5 1 4 -> lower median 0.5, scale 2; W x scale: 1, -8, 0.5 (half to even: 0), 2
    codes, scale = absmedian_ternary(f32(0.5, -4.0, 0.25, 1.0).reshape(2, 2))
    assert scale == 2.0
    assert codes.tolist() == [[1, -1], [0, 1]]


def test_absmedian_of_zeros_uses_the_clamp() -> None:
    codes, scale = absmedian_ternary(np.zeros((2, 4), np.float32))
    assert scale == np.float32(1) / np.float32(1e-5)
    assert not codes.any()


def test_absmedian_is_the_formula_in_torch() -> None:
    import torch

    weight = np.random.default_rng(5).standard_normal((12, 16)).astype(np.float32)
    codes, scale = absmedian_ternary(weight)
    w = torch.from_numpy(weight)
    expected_scale = 1 / torch.clamp(w.abs().median(), min=1e-5)
    assert scale == expected_scale.item()
    assert np.array_equal(codes, (w * expected_scale).round().clamp(-1, 1).numpy())
