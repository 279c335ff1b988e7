"""Q4_0: 32 nibbles and a scale, weight = (nibble - 8) x scale.

Source: the .mlb specification, "Q4_0" and "Quantization rule".
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import DataError, ShapeError, UsageError
from krafla_cli.quant.blocks import BLOCK, Float32, Quantized, Weights, check_blocks, checked, n_blocks, scale_type

Rule = Literal["fit", "round", "best"]
RULES: tuple[Rule, ...] = ("fit", "round", "best")

IMPORTANCE_FLOOR = 0.001


def as_rule(name: str) -> Rule:
    """The rule called ``name``; a :class:`UsageError` where there is none."""
    for rule in RULES:
        if rule == name:
            return rule
    raise UsageError(f"no Q4_0 rule is called {name!r}; there are {', '.join(RULES)}")


def channel_importance(mean_square: npt.NDArray[np.float64]) -> Float32 | None:
    """The importance of each input channel: its mean squared input over the mean of all, at least 0.001.

    ``mean_square`` float64 [cols] (sums serve as well: a common factor cancels). None where the mean over the channels
    is zero or not finite, so that no ratio exists. Source: the .mlb specification, "Quantization rule".
    """
    mean = float(np.mean(mean_square))
    if not np.isfinite(mean) or mean <= 0:
        return None
    return np.maximum(mean_square / mean, IMPORTANCE_FLOOR).astype(np.float32)


def quantize(w: Weights, scale_f16: bool, rule: Rule = "fit", importance: Float32 | None = None) -> Quantized:
    """Quantizes the matrix ``w`` [rows, cols]; see :func:`quantize_into`."""
    result = empty(w.shape, scale_f16)
    quantize_into(result, w, rule, importance)
    return result


def empty(shape: tuple[int, ...], scale_f16: bool) -> Quantized:
    """A matrix [rows, cols] that is still to be filled."""
    rows, cols = shape
    return Quantized(np.empty((rows, cols // 2), np.uint8), np.empty((rows, n_blocks(cols)), scale_type(scale_f16)))


def quantize_into(result: Quantized, w: Weights, rule: Rule = "fit", importance: Float32 | None = None) -> None:
    """Quantizes ``w`` [rows, cols] into ``result`` (C order).

    ``importance`` float32 [cols], of the input channels, is for "fit" and "best". "fit" keeps the best of 13
    least-squares fits per block; "best" is the exact minimum of the same weighted error; "round" is the largest element
    / -8, as Q4_0-trained checkpoints expect.

    Raises :class:`~krafla_cli.quant.blocks.WeightError` for a NaN, an infinity, or a scale above 65504 in f16;
    ShapeError and DataError for an importance of another length or not >= 0.
    """
    from krafla_cli.kernels.quantize_rows import Q4_0_BEST, Q4_0_FIT, Q4_0_ROUND, quantize_rows

    if rule == "round" and importance is not None:
        raise ValueError("the rule 'round' takes no importance")
    kernel = {"fit": Q4_0_FIT, "round": Q4_0_ROUND, "best": Q4_0_BEST}[rule]
    channels = None if importance is None else checked_importance(importance, w.shape[1])
    check_blocks(w, quantize_rows(kernel, checked(w), result.q, result.d, channels))


def checked_importance(importance: Float32, cols: int) -> Float32:
    """``importance`` as kernels take it. Raises ShapeError, DataError: another length, not finite, negative."""
    if importance.shape != (cols,):
        raise ShapeError(f"{importance.size} importances for rows of {cols} weights")
    if not (np.isfinite(importance).all() and (importance >= 0).all()):
        raise DataError("importances must be finite and not negative")
    return np.ascontiguousarray(importance, dtype=np.float32)


def levels_of(q: npt.NDArray[np.uint8], rows: int, cols: int) -> npt.NDArray[np.int8]:
    """The levels in [-8, 7], int8 [rows, cols], of rows x cols / 2 packed bytes."""
    packed = q.reshape(rows, n_blocks(cols), BLOCK // 2)
    levels = np.empty((rows, n_blocks(cols), BLOCK), np.int8)
    np.bitwise_and(packed, 15, out=levels[..., : BLOCK // 2], casting="unsafe")
    np.right_shift(packed, 4, out=levels[..., BLOCK // 2 :], casting="unsafe")
    levels -= 8
    return levels.reshape(rows, cols)


def dequantize(q: npt.NDArray[np.uint8], d: npt.NDArray[Any], rows: int, cols: int) -> Float32:
    """(nibble - 8) x d in float32 [rows, cols]; ``d`` float16 (widened exactly) or float32, any shapes."""
    blocks = (rows, n_blocks(cols), BLOCK)
    scales = d.reshape(blocks[:2]).astype(np.float32)
    levels = levels_of(q, rows, cols).reshape(blocks)
    return np.multiply(levels, scales[:, :, None], dtype=np.float32).reshape(rows, cols)
