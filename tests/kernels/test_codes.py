"""The activation quantizer against a scalar transcription of the specification."""

from __future__ import annotations

import numpy as np
import pytest

from krafla_cli.kernels import operations as ops
from tests.kernels.steps import Codes, quantized, run
from tests.quant.scalar import q8_0_block


def _special_rows() -> np.ndarray:
    """Blocks at the edges of the rule: zeros, tiny, huge, halves that round, both signs of the largest."""
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((12, 64)).astype(np.float32)
    rows[0] = 0
    rows[1, :32] = -0.0
    rows[2] *= np.float32(1e-31)
    rows[3, 0] = np.float32(1e-30)
    rows[3, 1:32] = 0
    rows[4] *= np.float32(1e-38)
    rows[5] *= np.float32(1e37)
    rows[6, :32] = np.float32(np.finfo(np.float32).max)
    rows[7, :32] = np.linspace(-127.5, 127.5, 32, dtype=np.float32)
    rows[8, :32] = (np.arange(32) - 16 + 0.5).astype(np.float32)
    rows[8, 0] = 127
    rows[9, 31] = -1000
    rows[10, 32:] = np.float32(1e-30) * np.linspace(0.5, 1.5, 32, dtype=np.float32)
    return rows


def test_codes_are_those_of_the_specification() -> None:
    x = _special_rows()
    got = quantized(x)
    for row, values in enumerate(x):
        for b in range(2):
            q, d = q8_0_block(list(values[32 * b : 32 * b + 32]), scale_f16=False)
            np.testing.assert_array_equal(got.codes[row, 32 * b : 32 * b + 32], q)
            assert got.dx[row, b].tobytes() == np.float32(d).tobytes()
            assert got.sx[row, b] == -4 * sum(q)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_reported_by_place_and_index(bad: float) -> None:
    x = np.ones((3, 96), np.float32)
    x[1, 40] = bad
    fault = run(ops.GATE_QUANTIZE, ops.GATED, 3, x=x, n_cols=96, place=7, **Codes(3, 96).operands)
    assert fault.tolist() == [8, 96 + 40, int(np.isnan(bad))]


def test_gates_and_threads() -> None:
    rng = np.random.default_rng(0)
    x, gate = rng.standard_normal((2, 5, 1024)).astype(np.float32)
    want = x * (1 / (1 + np.exp(-gate.astype(np.float64))))
    results = []
    for n_threads in (1, 3):
        codes, values = Codes(5, 1024), x.copy()
        run(
            ops.GATE_QUANTIZE,
            ops.GATED,
            5,
            0,
            n_threads,
            None,
            x=values,
            gate=gate,
            has_gate=1,
            n_cols=1024,
            **codes.operands,
        )
        np.testing.assert_allclose(values, want, rtol=1e-6)
        results.append((values.tobytes(), codes.codes.tobytes(), codes.dx.tobytes(), codes.sx.tobytes()))
    assert results[0] == results[1]
