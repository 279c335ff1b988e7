"""The errors of quantized matrices: against hand-computed values, and against the same formula in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from krafla_cli.errors import DataError, ShapeError
from krafla_cli.quant.blocks import Quantized, widen
from krafla_cli.quant.errors import Errors, errors_of
from krafla_cli.quant.matrix import dequantize, quantize

COLS = 320  # ten blocks: scales are taken eight at a time


def by_numpy(w: np.ndarray, matrix: Quantized, encoding: str, importance: np.ndarray | None) -> Errors:
    exact = widen(w)
    difference = (exact - dequantize(matrix.q, matrix.d, encoding, *exact.shape)).astype(np.float64)
    weights = np.ones(exact.shape[1]) if importance is None else importance.astype(np.float64)
    error, squares = difference**2, exact.astype(np.float64) ** 2
    return Errors(error.sum(), squares.sum(), (error * weights).sum(), (squares * weights).sum())


def weights_of(kind: str, rows: int) -> np.ndarray:
    w = np.random.default_rng(rows).standard_normal((rows, COLS)).astype(np.float32)
    if kind == "bfloat16":
        return (w.view(np.uint32) >> 16).astype(np.uint16)
    return w.astype(kind)


@pytest.mark.parametrize("with_importance", [False, True])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scale_f16", [True, False])
@pytest.mark.parametrize("encoding", ["q4_0", "q8_0"])
def test_sums_are_those_of_the_formula(encoding: str, scale_f16: bool, kind: str, with_importance: bool) -> None:
    w = weights_of(kind, 5)
    importance = np.random.default_rng(1).lognormal(0, 2, COLS).astype(np.float32) if with_importance else None
    matrix = quantize(w, encoding, scale_f16)
    found, expected = errors_of(w, matrix, encoding, importance), by_numpy(w, matrix, encoding, importance)
    for name in ("squared_error", "squares", "weighted_error", "weighted_squares"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-13)
    assert (found.relative == found.relative_weighted) is not with_importance


def test_every_level_by_hand() -> None:
    """Weights 0 against every level: the error is the sum of (level · d)²."""
    w = np.zeros((1, 32), np.float32)
    q4 = Quantized(np.arange(16, dtype=np.uint8)[None, :] * 17, np.full((1, 1), 0.5, np.float16))
    squares = sum((level * 0.5) ** 2 for level in range(-8, 8))
    assert errors_of(w, q4, "q4_0") == Errors(2 * squares, 0.0, 2 * squares, 0.0)
    levels = np.array([[-127, 127, -1, *range(29)]], np.int8)
    q8 = Quantized(levels, np.full((1, 1), 2.0, np.float32))
    expected = 4.0 * float((levels.astype(np.float64) ** 2).sum())
    assert errors_of(w, q8, "q8_0") == Errors(expected, 0.0, expected, 0.0)


def test_an_importance_weighs_its_channel() -> None:
    w = np.zeros((2, 64), np.float32)
    w[1, 40] = 3.0
    importance = np.ones(64, np.float32)
    importance[40] = 0.25
    nothing = Quantized(np.full((2, 32), 0x88, np.uint8), np.zeros((2, 2), np.float16))
    assert errors_of(w, nothing, "q4_0", importance) == Errors(9.0, 9.0, 2.25, 2.25)


def test_very_small_weights_have_an_error_as_well() -> None:
    w = np.full((1, 32), 1e-30, np.float32)  # its square is no float32 number
    nothing = Quantized(np.zeros((1, 32), np.int8), np.zeros((1, 1), np.float32))
    assert errors_of(w, nothing, "q8_0").relative == 1.0


def test_zeros_have_no_relative_error() -> None:
    w = np.zeros((1, 32), np.float32)
    assert errors_of(w, quantize(w, "q4_0"), "q4_0").relative == 0.0
    assert Errors().relative == Errors().relative_weighted == 0.0


def test_errors_of_parts_add_up() -> None:
    w = weights_of("float32", 4)
    matrix = quantize(w, "q4_0")
    halves = [errors_of(w[r], Quantized(matrix.q[r], matrix.d[r]), "q4_0") for r in (slice(2), slice(2, 4))]
    assert (halves[0] + halves[1]).relative == pytest.approx(errors_of(w, matrix, "q4_0").relative, rel=1e-14)


def test_wrong_importances_are_refused() -> None:
    w = weights_of("float32", 1)
    matrix = quantize(w, "q8_0")
    with pytest.raises(ShapeError, match="32 importances for rows of 320 weights"):
        errors_of(w, matrix, "q8_0", np.ones(32, np.float32))
    with pytest.raises(DataError, match="finite and not negative"):
        errors_of(w, matrix, "q8_0", np.full(COLS, -1, np.float32))
