"""Matrices of an .mlb file to and from float32, by encoding: what convert, the engines, tests and reports call."""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy.typing as npt

from krafla_cli.quant import q4_0, q8_0
from krafla_cli.quant.blocks import Float32, Quantized, Weights

Encoding = Literal["q8_0", "q4_0"]


def quantize(
    w: Weights,
    encoding: str,
    scale_f16: bool = True,
    rule: q4_0.Rule = "fit",
    importance: Float32 | None = None,
    n_threads: int | None = None,
) -> Quantized:
    """Quantizes ``w`` [rows, cols] (float32, float16, or uint16 bits of bfloat16) as ``encoding``, "q8_0" or "q4_0".

    ``rule`` and ``importance`` (float32 [cols]) act on q4_0 only. ``n_threads``: None for the physical cores; the
    result does not depend on it, and calls may overlap. Raises as :func:`krafla_cli.quant.q8_0.quantize` and
    :func:`krafla_cli.quant.q4_0.quantize`.
    """
    if _known(encoding) == "q8_0":
        return q8_0.quantize(w, scale_f16, n_threads)
    return q4_0.quantize(w, scale_f16, rule, importance, n_threads)


def dequantize(q: npt.NDArray[Any], d: npt.NDArray[Any], encoding: str, rows: int, cols: int) -> Float32:
    """The weights as the runtime reads them, float32 [rows, cols]: level x scale, one float32 product each."""
    if _known(encoding) == "q8_0":
        return q8_0.dequantize(q, d, rows, cols)
    return q4_0.dequantize(q, d, rows, cols)


def _known(encoding: str) -> Encoding:
    if encoding not in ("q8_0", "q4_0"):
        raise ValueError(f"no block encoding is called {encoding!r}")
    return cast(Encoding, encoding)
