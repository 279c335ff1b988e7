"""What the block encodings of the .mlb format share: the result type, widening of 16-bit weights, faulty weights.

A block is 32 consecutive weights of a row with one scale. Source: the .mlb specification, "Quantization rule".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import DataError, ShapeError

BLOCK = 32
F16_MAX = 65504.0

Float32 = npt.NDArray[np.float32]
Weights = npt.NDArray[Any]  # float32, float16, or uint16 holding bfloat16 bits


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix in the layout of the file.

    ``q``: int8 [rows, cols] (Q8_0) or uint8 [rows, cols / 2] (Q4_0); ``d``: float16 or float32 [rows, cols / 32].
    """

    q: npt.NDArray[Any]
    d: npt.NDArray[Any]


class WeightError(DataError):
    """The weight at ``row``, ``column`` cannot be quantized; callers put the tensor's name before the text."""

    def __init__(self, row: int, column: int, reason: str) -> None:
        super().__init__(f"row {row}, column {column}: {reason}")
        self.row = row
        self.column = column
        self.reason = reason


def checked(w: Weights) -> Weights:
    """``w`` in C order, after a look at its type."""
    if w.dtype not in (np.float16, np.float32, np.uint16):
        raise TypeError(f"weights must be float32, float16 or bfloat16 bits (uint16), not {w.dtype}")
    return np.ascontiguousarray(w)


def widen(w: Weights) -> Float32:
    """``w`` as float32, exactly: float32 and float16 as they are, uint16 as the bits of bfloat16."""
    w = checked(w)
    if w.dtype == np.uint16:
        return np.left_shift(w, np.uint32(16), dtype=np.uint32).view(np.float32)
    return w.astype(np.float32, copy=False)


def scale_type(scale_f16: bool) -> type[np.float16] | type[np.float32]:
    """The type of scales."""
    return np.float16 if scale_f16 else np.float32


def n_blocks(cols: int) -> int:
    """Blocks of a row of ``cols`` weights; a :class:`ShapeError` where they do not fill whole blocks."""
    if cols == 0 or cols % BLOCK:
        raise ShapeError(f"rows of {cols} weights are not whole blocks of {BLOCK}")
    return cols // BLOCK


def check_blocks(w: Weights, bad_block: npt.NDArray[np.int64]) -> None:
    """Raises a :class:`WeightError` for the first row whose kernel reported a block: ``bad_block`` [rows], else -1."""
    rows = np.flatnonzero(bad_block >= 0)
    if not rows.size:
        return
    row = int(rows[0])
    start = int(bad_block[row]) * BLOCK
    block = widen(w[row, start : start + BLOCK])
    faults = np.flatnonzero(~np.isfinite(block))
    if faults.size:
        value = block[faults[0]]
        raise WeightError(row, start + int(faults[0]), "NaN" if np.isnan(value) else f"{value:+} is not finite")
    largest = int(np.argmax(np.abs(block)))
    raise WeightError(
        row,
        start + largest,
        f"{block[largest]:g} needs a scale above {F16_MAX:g}, the largest that f16 holds; use --scales f32",
    )
