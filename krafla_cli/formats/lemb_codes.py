"""Packing of LEMB's int4 and ternary codes (section 5.3). Arrays in, arrays out; the last axis is packed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int8 = npt.NDArray[np.int8]
UInt8 = npt.NDArray[np.uint8]

_TERNARY_VALUES = np.array([0, 1, -1, 0], np.int8)  # by 2-bit code; 3 is reserved


def pack_int4(codes: Int8) -> UInt8:
    """Codes -8 to 7, [..., n] -> bytes [..., n / 2]: low nibble = element 2k, high nibble = 2k + 1."""
    nibbles = np.bitwise_and(codes.view(np.uint8), 15, dtype=np.uint8)
    packed: UInt8 = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return packed


def unpack_int4(packed: UInt8) -> Int8:
    """The inverse of :func:`pack_int4`, sign-extended (-8 too)."""
    signed = packed.view(np.int8)
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.int8)
    codes[..., 0::2] = (signed << 4) >> 4
    codes[..., 1::2] = signed >> 4
    return codes


def pack_ternary(codes: Int8) -> UInt8:
    """Codes -1, 0, 1, [..., n] -> bytes [..., n / 4], low bits = low index; 00 = 0, 01 = +1, 10 = -1."""
    bits = np.where(codes < 0, np.uint8(2), codes.view(np.uint8))  # 0, 1, -1 -> 0, 1, 2
    packed: UInt8 = bits[..., 0::4] | (bits[..., 1::4] << 2) | (bits[..., 2::4] << 4) | (bits[..., 3::4] << 6)
    return packed


def unpack_ternary(packed: UInt8) -> Int8:
    """The inverse of :func:`pack_ternary`; the reserved code 11 has been refused before."""
    codes = np.empty((*packed.shape, 4), np.int8)
    for k in range(4):
        codes[..., k] = _TERNARY_VALUES[(packed >> (2 * k)) & 3]
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 4)


def first_reserved(packed: UInt8) -> int | None:
    """Index of the first byte (in C order) that holds the reserved 2-bit code 11, if there is one."""
    found = (packed & (packed >> 1) & 0x55).ravel()
    return int(np.argmax(found != 0)) if found.any() else None
