"""Matrices of an .mlb file to and from float32, by encoding: what convert, the engines, tests and reports call."""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy.typing as npt

from krafla_cli.quant import q4_0, q8_0
from krafla_cli.quant.blocks import Float32, Quantized, Weights

Encoding = Literal["q8_0", "q4_0"]


def quantize(
    w: Weights, encoding: str, scale_f16: bool = True, rule: q4_0.Rule = "fit", importance: Float32 | None = None
) -> Quantized:
    """Quantizes ``w`` [rows, cols] (float32, float16, or uint16 bits of bfloat16) as ``encoding``, "q8_0" or "q4_0".

    See :func:`quantize_into`.
    """
    result = empty(encoding, w.shape, scale_f16)
    quantize_into(result, w, encoding, rule, importance)
    return result


def empty(encoding: str, shape: tuple[int, ...], scale_f16: bool) -> Quantized:
    """A quantized matrix [rows, cols] that is still to be filled."""
    return q8_0.empty(shape, scale_f16) if _known(encoding) == "q8_0" else q4_0.empty(shape, scale_f16)


def quantize_into(
    result: Quantized, w: Weights, encoding: str, rule: q4_0.Rule = "fit", importance: Float32 | None = None
) -> None:
    """Quantizes ``w`` into ``result``, of the same number of rows: a whole matrix or rows of it, on this thread.

    Other threads may quantize other rows meanwhile. ``rule`` and ``importance`` (float32 [cols]) act on q4_0 only.
    Raises as :func:`krafla_cli.quant.q8_0.quantize_into` and :func:`krafla_cli.quant.q4_0.quantize_into`.
    """
    if _known(encoding) == "q8_0":
        q8_0.quantize_into(result, w)
    else:
        q4_0.quantize_into(result, w, rule, importance)


def dequantize(q: npt.NDArray[Any], d: npt.NDArray[Any], encoding: str, rows: int, cols: int) -> Float32:
    """The weights as the runtime reads them, float32 [rows, cols]: level x scale, one float32 product each."""
    if _known(encoding) == "q8_0":
        return q8_0.dequantize(q, d, rows, cols)
    return q4_0.dequantize(q, d, rows, cols)


def _known(encoding: str) -> Encoding:
    if encoding not in ("q8_0", "q4_0"):
        raise ValueError(f"no block encoding is called {encoding!r}")
    return cast(Encoding, encoding)
