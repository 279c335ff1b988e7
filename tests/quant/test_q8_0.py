"""Q8_0: golden bytes, hand-computed values, the specification's limits, refusals."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from krafla_cli.errors import ShapeError
from krafla_cli.quant import q8_0
from krafla_cli.quant.blocks import WeightError
from krafla_cli.quant.matrix import dequantize, quantize


def _block(*values: float) -> np.ndarray:
    w = np.zeros((1, 32), np.float32)
    w[0, : len(values)] = values
    return w


def test_golden_bytes():
    result = quantize(_block(127.0, -1.0, 0.5, -0.5, 0.49, 63.5, -126.51), "q8_0", scale_f16=True)
    assert result.q.tobytes() == bytes([127, 255, 1, 255, 0, 64, 129]) + bytes(25)
    assert result.d.tobytes() == b"\x00\x3c"  # 1.0 in f16


def test_golden_bytes_with_float32_scales():
    result = quantize(_block(-2.0, 1.0), "q8_0", scale_f16=False)
    assert result.q.tobytes() == bytes([0x81, 64]) + bytes(30)  # -127; 1 x 63.5 + 0.5 = 64
    assert result.d.tobytes() == np.float32(2 / 127).tobytes()


def test_f16_quants_are_taken_against_the_rounded_scale():
    # 1/127 = 0.0078740 rounds to the f16 0.0078735 (2^-7 x 1.0078125 = 129/16384); 1 / 0.00787353 = 127.008.
    result = quantize(_block(1.0, 0.5), "q8_0", scale_f16=True)
    assert float(result.d[0, 0]) == 129 / 16384
    assert result.q[0, :2].tolist() == [127, 64]  # 0.5 x 127.008 + 0.5 = 64.004


def test_a_scale_rounded_down_far_is_clamped_to_127():
    # d = 1.4 x 2^-24 is stored as 2^-24, so the largest weight would be level 178.
    d = 1.4 * 2.0**-24
    result = quantize(_block(127 * d, -127 * d), "q8_0", scale_f16=True)
    assert float(result.d[0, 0]) == 2.0**-24
    assert result.q[0, :3].tolist() == [127, -127, 0]


@pytest.mark.parametrize("largest", [0.0, 1e-37, 9e-31])
def test_magnitudes_below_1e_30_are_a_zero_block(largest):
    result = quantize(_block(largest), "q8_0", scale_f16=False)
    assert result.d[0, 0] == 0
    assert not result.q.any()


def test_a_scale_that_rounds_to_zero_in_f16_gives_zero_quants():
    result = quantize(_block(127 * 2.0**-26), "q8_0", scale_f16=True)
    assert result.d.tobytes() == b"\0\0"
    assert not result.q.any()


def test_a_scale_above_65504_is_refused_in_f16_only():
    limit = np.float32(65504 * 127)
    assert float(quantize(_block(limit), "q8_0", scale_f16=True).d[0, 0]) == 65504
    w = np.zeros((3, 64), np.float32)
    w[2, 40] = -1e7
    with pytest.raises(WeightError, match="row 2, column 40: -1e\\+07 needs a scale above 65504") as caught:
        quantize(w, "q8_0", scale_f16=True)
    assert (caught.value.row, caught.value.column) == (2, 40)
    assert quantize(w, "q8_0", scale_f16=False).q[2, 40] == -127


@pytest.mark.parametrize(("value", "text"), [(np.nan, "NaN"), (np.inf, "+inf"), (-np.inf, "-inf")])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_that_are_not_finite_are_named(value, text, dtype):
    w = np.ones((4, 96), dtype)
    w[1, 70] = value
    w[3, 0] = np.nan
    with pytest.raises(WeightError) as caught:
        quantize(w, "q8_0")
    assert (caught.value.row, caught.value.column) == (1, 70)
    assert text in str(caught.value)


def test_quants_never_hold_minus_128():
    w = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    assert quantize(w, "q8_0").q.min() == -127


def test_dequantize_multiplies_in_float32():
    q = np.arange(-16, 16, dtype=np.int8)[None, :]
    d = np.array([[0.1]], np.float16)
    w = dequantize(q.view(np.uint8).ravel(), d.ravel(), "q8_0", 1, 32)
    np.testing.assert_array_equal(w, q.astype(np.float32) * np.float32(np.float16(0.1)))
    assert w.dtype == np.float32


def test_a_round_trip_is_within_half_a_step():
    w = np.random.default_rng(1).standard_normal((8, 128)).astype(np.float32)
    result = quantize(w, "q8_0", scale_f16=False)
    steps = result.d.repeat(32, axis=1)
    assert (np.abs(dequantize(result.q, result.d, "q8_0", 8, 128) - w) <= steps * 0.50001).all()


def test_activations_of_any_rank_are_quantized_as_float32_scaled_blocks():
    x = np.random.default_rng(2).standard_normal((2, 3, 64)).astype(np.float32)
    result = q8_0.quantize_activations(x)
    flat = quantize(x.reshape(6, 64), "q8_0", scale_f16=False)
    np.testing.assert_array_equal(result.q.reshape(6, 64), flat.q)
    np.testing.assert_array_equal(result.d, flat.d.reshape(2, 3, 2))
    assert result.d.dtype == np.float32


def test_rows_that_are_not_whole_blocks_are_refused():
    with pytest.raises(ShapeError, match="172"):
        quantize(np.zeros((2, 172), np.float32), "q8_0")


def test_importing_the_quantizers_loads_neither_torch_nor_numba():
    code = "import sys, krafla_cli.quant.matrix; print([m for m in ('torch', 'numba') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
