"""Ternary weight matrices by AbsMedian. Source: the LEMB specification, section 6.3, point 5."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int8 = npt.NDArray[np.int8]

_MIN_MEDIAN = np.float32(1e-5)


def lower_median(values: Float32) -> np.float32:
    """The middle value of all elements, the lower of the two where their number is even (as torch.median)."""
    flat = values.ravel()
    middle = (flat.size - 1) // 2
    return np.float32(np.partition(flat, middle)[middle])


def absmedian_ternary(weight: Float32) -> tuple[Int8, np.float32]:
    """Codes -1, 0, 1 of ``weight``'s shape, and the ``scale`` that the file stores.

    scale = 1 / max(median |W|, 1e-5); code = round(W x scale), half to even, clamped to -1 .. 1; so W is about
    code / scale. All in float32. ``weight`` is finite.
    """
    scale = np.float32(1.0) / np.maximum(lower_median(np.abs(weight)), _MIN_MEDIAN)
    codes = np.clip(np.rint(weight * scale), -1, 1).astype(np.int8)
    return codes, np.float32(scale)
