"""Looking for values that no training makes: NaN and infinite numbers, rows that are all zero. At memory speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.formats.data_types import DataType
from krafla_cli.formats.faults import Report

Array = npt.NDArray[Any]
_CHUNK = 1 << 18  # values looked at together; they stay in the second-level cache
_ROWS = 256  # rows looked at together
F16_EXPONENT, _BF16_EXPONENT = 0x7C00, 0x7F80  # what NaN and infinity have in the bits below the sign
_FLOATS: dict[str, type[np.generic]] = {"F32": np.float32, "F64": np.float64, "F16": np.uint16, "BF16": np.uint16}
# Block types of GGUF and MLLM: offsets of the f16 numbers in a block (scale, minimum), from ggml's structures.
_F16_IN_BLOCK = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
}  # fmt: skip
_MXFP4_NAN = 255  # as the exponent of an MXFP4 block


def first_not_finite(values: Array, exponent: int = F16_EXPONENT) -> int | None:
    """Index of the first NaN or infinity in the 1-d ``values``: float32, float64, or uint16 bits with ``exponent``."""
    is_bits = values.dtype == np.uint16
    for start in range(0, len(values), _CHUNK):
        chunk = values[start : start + _CHUNK]
        bad = (chunk & 0x7FFF) >= exponent if is_bits else ~np.isfinite(chunk)
        if bad.any():
            return start + int(np.argmax(bad))
    return None


def zero_rows(values: Array, zero: int = 0, scales: Array | None = None) -> list[int]:
    """The rows of ``values`` [rows, columns] in which all are ``zero``, unless they are just the last ones.

    Vocabularies and FFNs are padded with rows of zeros at their end. With ``scales`` [rows, blocks], a block of columns
    whose scale is 0 counts as zero.
    """
    with np.errstate(invalid="ignore"):  # a NaN is no zero
        found = [row for rows in _candidates(values, zero, scales) for row in _zero_among(rows, values, zero, scales)]
    is_padding = len(found) < len(values) and found == list(range(len(values) - len(found), len(values)))
    return [] if is_padding else found


def _candidates(values: Array, zero: int, scales: Array | None) -> Iterator[npt.NDArray[np.intp]]:
    """The rows that begin with a zero, some at a time: one look at a row rules out almost all of them."""
    begins_so = values[:, 0] == zero
    if scales is not None:
        begins_so |= scales[:, 0] == 0
    rows = np.flatnonzero(begins_so)
    for start in range(0, len(rows), _ROWS):
        yield rows[start : start + _ROWS]


def _zero_among(rows: npt.NDArray[np.intp], values: Array, zero: int, scales: Array | None) -> list[int]:
    is_zero = values[rows] == zero
    if scales is not None:
        blocks = is_zero.reshape(len(rows), scales.shape[1], -1).all(axis=2)
        is_zero = blocks | (scales[rows] == 0)
    zero_ones: list[int] = rows[is_zero.all(axis=1)].tolist()
    return zero_ones


def rows_text(rows: list[int]) -> str:
    """What to say about the rows that :func:`zero_rows` found."""
    if len(rows) == 1:
        return f"row {rows[0]} is all zero"
    return f"{len(rows)} rows are all zero, the first is row {rows[0]}"


def warn_about_gaps(data: memoryview, spans: list[tuple[int, int, str]], end: int, report: Report) -> None:
    """Warns where bytes before ``end`` that belong to none of ``spans`` (start, stop, printable name) are not zero."""
    position, before = 0, "the start"
    for start, stop, name in (*sorted(spans), (end, end, "")):
        if start > position and np.frombuffer(data[position:start], np.uint8).any():
            report.warn(f"padding after {before}", position, "is not zero")
        if stop > position:
            position, before = stop, name


def warn_about_tensor(
    content: memoryview, name: str, kind: DataType, shape: tuple[int, ...] | None, offset: int, report: Report
) -> None:
    """Warns about the values of a tensor of a GGUF or MLLM file: its bytes are ``content``, at ``offset``."""
    n_blocks = len(content) // kind.n_bytes if kind.n_bytes else 0
    if not n_blocks:
        return
    numbers = list(_numbers(content, kind, n_blocks))
    for place, values in numbers:
        bad = first_not_finite(values, _BF16_EXPONENT if kind.name == "BF16" else F16_EXPONENT)
        if bad is not None:
            what = f"element {bad}" if kind.block == 1 else f"a scale of block {bad}"
            report.warn(name, offset + bad * kind.n_bytes + place, f"{what} is NaN or infinite")
    if kind.name == "MXFP4":
        exponents = np.frombuffer(content, np.uint8, n_blocks * kind.n_bytes)[kind.n_bytes - 1 :: kind.n_bytes]
        if exponents.max() == _MXFP4_NAN:
            report.warn(name, offset, f"the scale of block {int(np.argmax(exponents == _MXFP4_NAN))} is NaN")
    if shape is not None and len(shape) > 1 and len(numbers) == 1:
        # In a block type with one number, its scale, blocks without a scale are zero.
        rows = zero_rows(numbers[0][1].reshape(-1, shape[-1] // kind.block))
        if rows:
            report.warn(name, offset, rows_text(rows))


def _numbers(content: memoryview, kind: DataType, n_blocks: int) -> Iterator[tuple[int, Array]]:
    """The place in a block, and the values in all blocks, of each float number that a block has."""
    if kind.name in _FLOATS:
        yield 0, np.frombuffer(content, _FLOATS[kind.name], n_blocks)
    for place in _F16_IN_BLOCK.get(kind.name, ()):
        block = np.dtype({"names": ["d"], "formats": ["<u2"], "offsets": [place], "itemsize": kind.n_bytes})
        yield place, np.frombuffer(content, block, n_blocks)["d"]
