"""MXFP4: 32 numbers of 4 bits (E2M1) and a power of two as their scale (E8M0).

Source: the MLLM documentation, "MXFP4", and the OCP Microscaling Formats specification 1.0 (the choice of scale). The
bytes are MLLM's: 16 with two codes each, element 2k in the low and 2k + 1 in the high nibble of byte k, then the scale.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import DataError

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK, BLOCK_BYTES = 32, 17
BIAS = 127
E8M0_NAN = 255
LARGEST = np.float32(6.0)
# The value of each code; bit 3 is the sign.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_LARGEST_EXPONENT = 2  # of an E2M1 number: 6 = 1.5 x 2^2
# Halfway points between neighbours of VALUES[:8]; a value on one goes to the neighbour with the even code.
_HALFWAY = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)


def dequantize_blocks(blocks: Bytes) -> Float32:
    """float32 [n, 32] of uint8 [n, 17]: table x 2^(scale - 127).

    Raises DataError naming the first block whose scale is 255 (not a number).
    """
    exponents = blocks[:, 16]
    bad = np.flatnonzero(exponents == E8M0_NAN)
    if bad.size:
        raise DataError(f"MXFP4 block {int(bad[0])}: scale {E8M0_NAN} stands for NaN")
    codes = np.empty((len(blocks), BLOCK), np.uint8)
    codes[:, 0::2] = blocks[:, :16] & 15
    codes[:, 1::2] = blocks[:, :16] >> 4
    return np.ldexp(VALUES[codes], (exponents.astype(np.int32) - BIAS)[:, None])


def quantize_blocks(values: Float32) -> Bytes:
    """uint8 [n, 17] of float32 [n, 32], finite.

    The scale is 2^(floor(log2 max |x|) - 2), within 2^-127 .. 2^127, so that the largest element falls on 4 to 8; each
    element goes to the nearest number, ties to the even code, and beyond 6 to 6. A block of zeros has scale 2^-127.
    """
    largest = np.abs(values).max(axis=1)
    exponents = np.frexp(largest)[1] - 1 - _LARGEST_EXPONENT
    exponents = np.clip(np.where(largest > 0, exponents, -BIAS), -BIAS, BIAS)
    # In float64 no element becomes subnormal on the way.
    scaled = np.ldexp(values.astype(np.float64), -exponents[:, None])
    codes = _nearest_codes(np.abs(scaled)) | (np.signbit(values).astype(np.uint8) << 3)
    blocks = np.empty((len(values), BLOCK_BYTES), np.uint8)
    blocks[:, :16] = codes[:, 0::2] | (codes[:, 1::2] << 4)
    blocks[:, 16] = exponents + BIAS
    return blocks


def _nearest_codes(magnitudes: npt.NDArray[np.float64]) -> Bytes:
    below = np.searchsorted(_HALFWAY, magnitudes, side="left")  # halfway counts as the lower neighbour
    above = np.searchsorted(_HALFWAY, magnitudes, side="right")  # halfway counts as the upper one
    return np.where(below % 2 == 0, below, above).astype(np.uint8)
