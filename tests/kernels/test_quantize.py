"""The kernels against the scalar transcription of the specification, bit for bit, on blocks of every kind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from krafla_cli.quant.blocks import WeightError
from krafla_cli.quant.matrix import quantize
from tests.quant import scalar

KINDS = [("q8_0", "fit"), ("q4_0", "round"), ("q4_0", "fit")]
COLS = 64
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _scaled_normals(seed: int, exponent: int) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal((2, COLS)) * 10.0**exponent
    return np.clip(w, -3e38, 3e38).astype(np.float32)


def _ties(seed: int, unit: float) -> np.ndarray:
    """Multiples of half a step, so that levels fall on the middle between two integers, and equal magnitudes."""
    return (np.random.default_rng(seed).integers(-16, 17, (2, COLS)) * unit / 2).astype(np.float32)


def _spikes(seed: int, spike: float, rest: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    w = np.full((2, COLS), rest, np.float32)
    w[0, rng.integers(COLS)] = spike
    w[1, rng.integers(COLS)] = -spike
    return w


SEEDS = st.integers(0, 2**32 - 1)
UNITS = st.sampled_from([1.0, 0.1, 1 / 3, 1e-3, 7e-6, 1e-6, 1e6, 2.0**-24, 1e-30, 1e-38, 1e-44])
MATRICES = st.one_of(
    hnp.arrays(np.float32, (2, COLS), elements=FLOATS),
    st.builds(_scaled_normals, SEEDS, st.integers(-46, 38)),
    st.builds(_scaled_normals, SEEDS, st.sampled_from([-8, -7, -6, 5, 6, 7])),
    st.builds(_ties, SEEDS, UNITS),
    st.builds(_spikes, SEEDS, FLOATS, st.sampled_from([0.0, 1e-45, 1e-3, -1.0])),
)


def assert_bit_equal(w, encoding, scale_f16, rule, importance=None):
    """``quantize`` and the transcription agree: the same bytes, or both refuse."""
    try:
        q, d = scalar.quantize_rows(w, encoding, scale_f16, rule, importance)
    except scalar.CannotStoreError:
        with pytest.raises(WeightError):
            quantize(w, encoding, scale_f16, rule, importance)
        return
    result = quantize(w, encoding, scale_f16, rule, importance)
    np.testing.assert_array_equal(result.q, np.array(q).astype(result.q.dtype))
    expected = np.array(d, np.float32)
    np.testing.assert_array_equal(result.d.astype(np.float32).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("scale_f16", [True, False])
@pytest.mark.parametrize(("encoding", "rule"), KINDS)
@given(w=MATRICES)
@example(w=np.zeros((2, COLS), np.float32))
@example(w=np.full((2, COLS), -0.0, np.float32))
@example(w=np.full((2, COLS), 1e-37, np.float32))
@example(w=np.full((2, COLS), np.float32(3.4028235e38)))
@example(w=np.full((2, COLS), 1e-45, np.float32))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_kernels_give_the_bits_of_the_transcription(encoding, rule, scale_f16, w):
    assert_bit_equal(w, encoding, scale_f16, rule)


IMPORTANCES = st.one_of(
    st.builds(lambda s: np.random.default_rng(s).lognormal(0, 2, COLS).astype(np.float32), SEEDS),
    st.builds(lambda s: np.random.default_rng(s).integers(0, 2, COLS).astype(np.float32), SEEDS),
    st.just(np.zeros(COLS, np.float32)),
    st.just(np.full(COLS, 1e-3, np.float32)),
)


@pytest.mark.parametrize("scale_f16", [True, False])
@given(w=MATRICES, importance=IMPORTANCES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_importance_weighted_fit_gives_the_bits_of_the_transcription(scale_f16, w, importance):
    assert_bit_equal(w, "q4_0", scale_f16, "fit", importance)


@pytest.mark.parametrize("with_importance", [False, True])
def test_many_blocks_whose_candidates_are_nearly_equal(with_importance):
    """Small integers times a unit: several candidates come to an error of almost 0, so that each rounding counts."""
    rng = np.random.default_rng(8)
    w = rng.integers(-9, 10, (200, COLS)) * rng.choice([0.1, 0.03, 7e-5], (200, 1))
    importance = rng.lognormal(0, 1, COLS).astype(np.float32) if with_importance else None
    assert_bit_equal(w.astype(np.float32), "q4_0", False, "fit", importance)


@pytest.mark.parametrize(("encoding", "rule"), KINDS)
@pytest.mark.parametrize("n_rows", [1, 7, 8, 9, 17])
def test_any_number_of_rows(encoding, rule, n_rows):
    assert_bit_equal(_scaled_normals(4, 0).repeat(9, axis=0)[:n_rows], encoding, True, rule)


@pytest.mark.parametrize(("encoding", "rule"), KINDS)
def test_bfloat16_and_float16_give_the_bytes_of_their_float32_values(encoding, rule):
    w = _scaled_normals(2, -2)
    bf16_bits = (w.view(np.uint32) >> 16).astype(np.uint16)
    as_f32 = (bf16_bits.astype(np.uint32) << 16).view(np.float32)
    for narrow, wide in ((bf16_bits, as_f32), (w.astype(np.float16), w.astype(np.float16).astype(np.float32))):
        a, b = quantize(narrow, encoding, True, rule), quantize(wide, encoding, True, rule)
        np.testing.assert_array_equal(a.q, b.q)
        np.testing.assert_array_equal(a.d.view(np.uint16), b.d.view(np.uint16))


@pytest.mark.parametrize(("encoding", "rule"), KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_read_only_and_unaligned_weights_as_a_mapped_file_gives_them(encoding, rule, dtype):
    w = np.random.default_rng(3).integers(0, 0x3C00, (3, COLS)).astype(np.uint16)
    w = w if dtype == np.uint16 else w.view(np.float16).astype(dtype)
    unaligned = np.frombuffer(b"\0" + w.tobytes(), np.uint8)[1:].view(dtype).reshape(w.shape)
    assert not unaligned.flags.writeable
    assert not unaligned.flags.aligned
    np.testing.assert_array_equal(quantize(unaligned, encoding, True, rule).q, quantize(w, encoding, True, rule).q)
