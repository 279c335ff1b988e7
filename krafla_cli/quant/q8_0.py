"""Q8_0: 32 int8 quants in [-127, 127] and a scale. Source: the .mlb specification, "Q8_0" and "Quantization rule"."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.quant.blocks import BLOCK, Float32, Quantized, Weights, check_blocks, checked, n_blocks, scale_type


def quantize(w: Weights, scale_f16: bool) -> Quantized:
    """Quantizes the matrix ``w`` [rows, cols]; see :func:`quantize_into`."""
    result = empty(w.shape, scale_f16)
    quantize_into(result, w)
    return result


def empty(shape: tuple[int, ...], scale_f16: bool) -> Quantized:
    """A matrix [rows, cols] that is still to be filled."""
    rows, cols = shape
    return Quantized(np.empty((rows, cols), np.int8), np.empty((rows, n_blocks(cols)), scale_type(scale_f16)))


def quantize_into(result: Quantized, w: Weights) -> None:
    """Quantizes ``w`` [rows, cols] into ``result`` (C order); with f16 scales the quants are taken against these.

    Raises :class:`~krafla_cli.quant.blocks.WeightError` for a NaN, an infinity, or a scale above 65504 in f16.
    """
    from krafla_cli.kernels.quantize_rows import Q8_0, quantize_rows

    check_blocks(w, quantize_rows(Q8_0, checked(w), result.q, result.d))


def quantize_activations(x: Float32) -> Quantized:
    """Quantizes ``x`` float32 [..., cols] as the runtime does: q int8 [..., cols], d float32 [..., cols / 32].

    Raises :class:`~krafla_cli.quant.blocks.WeightError` for a NaN or an infinity (its row in the
    leading axes flattened).
    """
    cols = x.shape[-1]
    result = quantize(x.reshape(-1, cols), scale_f16=False)
    return Quantized(result.q.reshape(x.shape), result.d.reshape(*x.shape[:-1], cols // BLOCK))


def dequantize(q: npt.NDArray[Any], d: npt.NDArray[Any], rows: int, cols: int) -> Float32:
    """q x d in float32 [rows, cols]; ``q`` int8 or bytes, ``d`` float16 (widened exactly) or float32, any shapes."""
    blocks = (rows, n_blocks(cols), BLOCK)
    scales = d.reshape(blocks[:2]).astype(np.float32)
    w = np.multiply(q.view(np.int8).reshape(blocks), scales[:, :, None], dtype=np.float32)
    return w.reshape(rows, cols)
