"""Q4_0: golden bytes, hand-computed values, both rules, importance, the specification's limits, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from krafla_cli.errors import DataError, ShapeError
from krafla_cli.quant.blocks import WeightError
from krafla_cli.quant.matrix import dequantize, quantize
from krafla_cli.quant.q4_0 import channel_importance, levels_of

RULES = ["fit", "round"]


def _block(*values: float) -> np.ndarray:
    w = np.zeros((1, 32), np.float32)
    w[0, : len(values)] = values
    return w


def _levels(result) -> list[int]:
    return levels_of(result.q, 1, 32)[0].tolist()


def test_golden_bytes_of_round():
    w = np.arange(-16, 16, dtype=np.float32)[None, :]
    result = quantize(w, "q4_0", scale_f16=True, rule="round")
    # d = -16 / -8 = 2; trunc(x / 2 + 8.5): -16 -> 0, -15 and -14 -> 1, ... -1 and 0 -> 8, ... 14 -> 15, 15 -> 16 -> 15.
    low = [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8]
    high = [8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15]
    assert result.q.tobytes() == bytes(a | b << 4 for a, b in zip(low, high, strict=True))
    assert result.d.tobytes() == b"\x00\x40"  # 2.0 in f16


def test_golden_bytes_of_a_block_that_fit_represents_exactly():
    # Multiples of -0.25 with -8 among them: the candidate -8 has error 0, d = 2 / -8.
    w = _block(2.0, -1.75, 0.25)
    w[0, 16] = -0.5
    result = quantize(w, "q4_0", scale_f16=False, rule="fit")
    assert result.q.tobytes() == bytes([0xA0, 0x8F, 0x87]) + bytes([0x88] * 13)
    assert result.d.tobytes() == np.float32(-0.25).tobytes()


def test_round_takes_the_first_of_two_equal_magnitudes():
    assert float(quantize(_block(-4.0, 4.0), "q4_0", rule="round").d[0, 0]) == 0.5
    assert float(quantize(_block(4.0, -4.0), "q4_0", rule="round").d[0, 0]) == -0.5


def test_round_uses_the_unrounded_scale():
    d = np.float32(1.0004)  # rounds to 1.0 in f16
    w = _block(-8 * d, np.float32(3.5001))
    result = quantize(w, "q4_0", scale_f16=True, rule="round")
    assert float(result.d[0, 0]) == 1.0
    assert _levels(result)[1] == 3  # 3.5001 / 1.0004 = 3.4987; against 1.0 it would be level 4


def test_fit_prefers_a_level_other_than_minus_8_where_it_is_better():
    # Multiples of 1/7 up to 1: the largest magnitude at level -7 represents every element.
    w = _block(1.0, -1.0, 3 / 7, -2 / 7)
    result = quantize(w, "q4_0", scale_f16=False, rule="fit")
    assert _levels(result)[:4] == [-7, 7, -3, 2]
    np.testing.assert_allclose(dequantize(result.q, result.d, "q4_0", 1, 32), w, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale_f16", [True, False])
def test_a_zero_block_is_scale_0_and_nibbles_8(rule, scale_f16):
    result = quantize(_block(-0.0), "q4_0", scale_f16, rule)
    assert result.q.tobytes() == b"\x88" * 16
    assert result.d.tobytes() == bytes(result.d.nbytes)


@pytest.mark.parametrize("rule", RULES)
def test_a_scale_that_rounds_to_zero_in_f16_is_a_zero_block(rule):
    result = quantize(_block(1e-8, -1e-8), "q4_0", True, rule)
    assert result.q.tobytes() == b"\x88" * 16
    assert result.d.tobytes() == b"\0\0"


def test_round_makes_a_zero_block_where_the_inverse_of_the_scale_is_infinite():
    result = quantize(_block(-1e-38, 1e-38), "q4_0", False, "round")
    assert result.q.tobytes() == b"\x88" * 16
    assert result.d[0, 0] == 0


@pytest.mark.parametrize("unit", [1e-37, 1e-20, 1e20, 1e37])
def test_fit_of_tiny_and_huge_blocks_has_the_levels_of_an_ordinary_one(unit):
    ordinary = np.random.default_rng(0).standard_normal((1, 32)).astype(np.float32)
    ordinary /= np.abs(ordinary).max()
    scaled = (ordinary.astype(np.float64) * unit).astype(np.float32)
    a, b = quantize(ordinary, "q4_0", False), quantize(scaled, "q4_0", False)
    assert _levels(a) == _levels(b)
    np.testing.assert_allclose(b.d / unit, a.d, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_a_scale_above_65504_is_refused_in_f16_only(rule):
    w = np.zeros((3, 64), np.float32)
    w[1, 33] = 1e6
    with pytest.raises(WeightError, match="row 1, column 33: 1e\\+06 needs a scale above 65504"):
        quantize(w, "q4_0", True, rule)
    np.testing.assert_allclose(dequantize(*_parts(quantize(w, "q4_0", False, rule)), 3, 64), w, rtol=1e-6)


def _parts(result):
    return result.q, result.d, "q4_0"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(rule, value):
    w = np.ones((4, 96), np.float32)
    w[2, 95] = value
    with pytest.raises(WeightError) as caught:
        quantize(w, "q4_0", True, rule)
    assert (caught.value.row, caught.value.column) == (2, 95)


def test_every_nibble_dequantizes_to_its_level_times_the_scale():
    q = np.array([low | high << 4 for low, high in zip(range(16), reversed(range(16)), strict=True)], np.uint8)
    w = dequantize(q, np.array([0.5], np.float16), "q4_0", 1, 32)
    np.testing.assert_array_equal(w[0, :16], (np.arange(16) - 8) * 0.5)
    np.testing.assert_array_equal(w[0, 16:], (np.arange(15, -1, -1) - 8) * 0.5)


def test_importance_moves_the_error_to_unimportant_channels():
    w = np.random.default_rng(3).standard_normal((64, 32)).astype(np.float32)
    importance = np.full(32, 1e-3, np.float32)
    importance[:4] = 100.0
    plain, weighted = quantize(w, "q4_0"), quantize(w, "q4_0", importance=importance)
    errors = [((dequantize(r.q, r.d, "q4_0", 64, 32) - w)[:, :4] ** 2).sum() for r in (plain, weighted)]
    assert errors[1] < 0.7 * errors[0]


def test_importance_of_zero_for_a_whole_block_weighs_its_elements_equally():
    w = np.random.default_rng(4).standard_normal((2, 64)).astype(np.float32)
    importance = np.concatenate([np.zeros(32), np.ones(32)]).astype(np.float32)
    result = quantize(w, "q4_0", importance=importance)
    assert np.isfinite(result.d).all()
    assert np.abs(dequantize(result.q, result.d, "q4_0", 2, 64) - w).max() < 0.3


def test_importance_with_very_large_and_very_small_rows():
    w = np.random.default_rng(5).standard_normal((1, 64)).astype(np.float32)
    importance = np.random.default_rng(6).random(64).astype(np.float32)
    expected = quantize(w, "q4_0", False, importance=importance)
    for power in (-100, 100):
        scaled = quantize(np.ldexp(w, power), "q4_0", False, importance=importance)
        # Scaled blocks are fitted in units of their largest magnitude, which rounds: d agrees, not to the last bit.
        np.testing.assert_array_equal(scaled.q, expected.q)
        np.testing.assert_allclose(np.ldexp(scaled.d, -power), expected.d, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_bad_importances_are_refused(bad):
    importance = np.ones(64, np.float32)
    importance[5] = bad
    with pytest.raises(DataError, match="finite and not negative"):
        quantize(np.ones((1, 64), np.float32), "q4_0", importance=importance)
    with pytest.raises(ShapeError, match="32 importances for rows of 64"):
        quantize(np.ones((1, 64), np.float32), "q4_0", importance=np.ones(32, np.float32))


def test_channel_importance_is_the_ratio_to_the_mean_with_a_floor():
    ratios = channel_importance(np.array([0.0, 1.0, 3.0, 4.0]))
    np.testing.assert_array_equal(ratios, np.array([0.001, 0.5, 1.5, 2.0], np.float32))


@pytest.mark.parametrize("sums", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_channel_importance_needs_a_finite_positive_mean(sums):
    assert channel_importance(np.array(sums)) is None


def test_rows_that_are_not_whole_blocks_are_refused():
    with pytest.raises(ShapeError, match="172"):
        quantize(np.zeros((2, 172), np.float32), "q4_0")
