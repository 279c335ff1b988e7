"""Quantized rows of LEMB embedding tables: one float32 scale a row, value = code x scale.

Source: the LEMB specification, section 5.3; the ternary threshold minimizes the squared error exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int8 = npt.NDArray[np.int8]
Bool = npt.NDArray[np.bool_]

_ROWS_AT_ONCE = 2048  # bounds the float64 working set


@dataclass(frozen=True)
class QuantizedRows:
    """``codes`` int8 [rows, d], ``scales`` float32 [rows]."""

    codes: Int8
    scales: Float32

    def dequantized(self) -> Float32:
        """float32 [rows, d], multiplied in float32 as an engine does."""
        return self.codes.astype(np.float32) * self.scales[:, None]


def symmetric_rows(rows: Float32, max_code: int) -> QuantizedRows:
    """Codes -max_code .. max_code (127 for int8, 7 for int4) with scale = max |row| / max_code; half to even.

    A row of zeros, or one so small that its scale is not a float32 number, has scale 0. ``rows`` is finite.
    """
    scales = (np.abs(rows).max(axis=1) / np.float32(max_code)).astype(np.float32)
    divisor = np.where(scales > 0, scales, np.float32(1))
    codes = np.clip(np.rint(rows / divisor[:, None]), -max_code, max_code)
    return QuantizedRows(np.where(scales[:, None] > 0, codes, 0).astype(np.int8), scales)


def ternary_rows(rows: Float32) -> QuantizedRows:
    """The codes -1, 0, 1 and the scale with the least squared error of each row.

    With the k largest magnitudes kept, the best scale is their mean m, and it takes k x m^2 off the squared error:
    sorting the magnitudes and trying every k is exact. The first best k wins. ``rows`` is finite.
    """
    return _keep_magnitudes(rows, _least_squares_kept)


def half_mean_rows(rows: Float32) -> QuantizedRows:
    """The usual rule, for comparison: magnitudes over half their row's mean are kept, the scale is their mean."""
    return _keep_magnitudes(rows, lambda magnitudes: magnitudes > 0.5 * magnitudes.mean(axis=1, keepdims=True))


def relative_error(rows: Float32, quantized: QuantizedRows) -> float:
    """The root of (squared error / squared values) over all rows; 0 for a table of zeros."""
    error = total = 0.0
    for part in _parts(len(rows)):
        exact = rows[part].astype(np.float64)
        stored = quantized.codes[part] * quantized.scales[part, None].astype(np.float64)
        error += float(np.square(exact - stored).sum())
        total += float(np.square(exact).sum())
    return float((error / total) ** 0.5) if total else 0.0


def _least_squares_kept(magnitudes: Float64) -> Bool:
    order = np.argsort(-magnitudes, axis=1, kind="stable")
    sums = np.cumsum(np.take_along_axis(magnitudes, order, axis=1), axis=1)
    n_kept = np.arange(1, magnitudes.shape[1] + 1)
    best = np.argmax(np.square(sums) / n_kept, axis=1)
    kept = np.empty(magnitudes.shape, np.bool_)
    np.put_along_axis(kept, order, n_kept <= best[:, None] + 1, axis=1)
    return kept


def _keep_magnitudes(rows: Float32, choose: Callable[[Float64], Bool]) -> QuantizedRows:
    """Ternary rows that keep what ``choose`` says of the magnitudes; the scale is the mean of those kept."""
    codes = np.zeros(rows.shape, np.int8)
    scales = np.zeros(len(rows), np.float32)
    for part in _parts(len(rows)):
        magnitudes = np.abs(rows[part].astype(np.float64))
        kept = choose(magnitudes)
        scales[part] = np.where(kept, magnitudes, 0).sum(axis=1) / np.maximum(kept.sum(axis=1), 1)
        codes[part] = np.where(kept & (scales[part, None] > 0), np.sign(rows[part]), 0)
    return QuantizedRows(codes, scales)


def _parts(n_rows: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, n_rows, _ROWS_AT_ONCE))
