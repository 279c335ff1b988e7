"""How far a quantized matrix is from its weights."""

from __future__ import annotations

from dataclasses import dataclass

from krafla_cli.quant.blocks import Float32, Quantized, Weights, checked
from krafla_cli.quant.q4_0 import checked_importance


@dataclass(frozen=True)
class Errors:
    """Sums over weights: of squared errors and of squares, and both times the importance of the weight's channel."""

    squared_error: float = 0.0
    squares: float = 0.0
    weighted_error: float = 0.0
    weighted_squares: float = 0.0

    def __add__(self, other: Errors) -> Errors:
        return Errors(
            self.squared_error + other.squared_error,
            self.squares + other.squares,
            self.weighted_error + other.weighted_error,
            self.weighted_squares + other.weighted_squares,
        )

    @property
    def relative(self) -> float:
        """The root of the summed squared errors over the summed squares; 0 where all weights are 0."""
        return float((self.squared_error / self.squares) ** 0.5) if self.squares else 0.0

    @property
    def relative_weighted(self) -> float:
        """The same with every square times its channel's importance: of products with inputs, not of the matrix."""
        return float((self.weighted_error / self.weighted_squares) ** 0.5) if self.weighted_squares else 0.0


def errors_of(w: Weights, matrix: Quantized, encoding: str, importance: Float32 | None = None) -> Errors:
    """The errors of ``matrix`` against ``w`` [rows, cols], whole or some rows, in C order; on this thread.

    Without an ``importance`` float32 [cols] all channels weigh 1. Differences are float32, all else is float64 in a
    fixed order. Raises ShapeError and DataError as :func:`~krafla_cli.quant.q4_0.quantize_into`.
    """
    from krafla_cli.kernels.quantize_rows import row_errors

    channels = None if importance is None else checked_importance(importance, w.shape[1])
    rows = row_errors(encoding, checked(w), matrix.q, matrix.d, channels)
    return Errors(*(float(total) for total in rows.sum(axis=0)))
