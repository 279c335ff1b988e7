"""Q4_0 and Q8_0 blocks as GGUF and MLLM files store them, to and from the separate arrays of the .mlb format.

A block is its f16 scale and then its quants (18 and 34 bytes); nibbles and levels mean the same in both formats.
Source: ggml's block_q4_0 and block_q8_0; the .mlb specification, "Q8_0" and "Q4_0".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from krafla_cli.quant import q8_0
from krafla_cli.quant.blocks import BLOCK, Quantized, WeightError

Bytes = npt.NDArray[np.uint8]
QUANT_BYTES = {"q4_0": BLOCK // 2, "q8_0": BLOCK}
_SCALE_BYTES = 2


def split(data: Bytes, encoding: str, rows: int, cols: int) -> Quantized:
    """The quants and f16 scales of ``data``, uint8 with rows x cols / 32 blocks of ``encoding`` ("q4_0", "q8_0")."""
    n_quants = QUANT_BYTES[encoding]
    blocks = data.reshape(rows, cols // BLOCK, _SCALE_BYTES + n_quants)
    d = np.ascontiguousarray(blocks[:, :, :_SCALE_BYTES]).view("<f2").reshape(rows, -1)
    q = np.ascontiguousarray(blocks[:, :, _SCALE_BYTES:]).reshape(rows, -1)
    return Quantized(q.view(np.int8) if encoding == "q8_0" else q, d.astype(np.float16, copy=False))


def join(matrix: Quantized, encoding: str) -> Bytes:
    """The inverse of :func:`split`: uint8 [rows, row bytes]. Scales are f16."""
    rows, n_blocks = matrix.d.shape
    n_quants = QUANT_BYTES[encoding]
    blocks = np.empty((rows, n_blocks, _SCALE_BYTES + n_quants), np.uint8)
    blocks[:, :, :_SCALE_BYTES] = np.ascontiguousarray(matrix.d, "<f2").view(np.uint8).reshape(rows, n_blocks, -1)
    blocks[:, :, _SCALE_BYTES:] = matrix.q.view(np.uint8).reshape(rows, n_blocks, n_quants)
    return blocks.reshape(rows, -1)


def block_order(columns: npt.NDArray[np.intp]) -> npt.NDArray[np.intp] | None:
    """The order of whole blocks that an order of columns is; None where it takes blocks apart."""
    blocks = columns.reshape(-1, BLOCK)
    starts = blocks[:, :1]
    if (starts % BLOCK).any() or (blocks != starts + np.arange(BLOCK)).any():
        return None
    return starts[:, 0] // BLOCK


def with_block_order(matrix: Quantized, order: npt.NDArray[np.intp]) -> Quantized:
    """A matrix of the blocks ``order`` of each row."""
    rows, n_blocks = matrix.d.shape
    q = matrix.q.reshape(rows, n_blocks, -1)[:, order]
    return Quantized(q.reshape(rows, -1), matrix.d[:, order])


def check_scales(matrix: Quantized) -> None:
    """Raises WeightError for the first scale that is NaN or infinite, at its block's first weight."""
    bad = np.argwhere(~np.isfinite(matrix.d))
    if bad.size:
        row, block = (int(i) for i in bad[0])
        raise WeightError(row, block * BLOCK, f"its block has the scale {matrix.d[row, block]}")


def without_minus_128(matrix: Quantized) -> tuple[Quantized, int]:
    """A Q8_0 matrix in which blocks that hold -128, which .mlb refuses, are quantized anew; and their number."""
    rows, n_blocks = matrix.d.shape
    blocks = matrix.q.reshape(rows, n_blocks, BLOCK)
    bad = (blocks == -128).any(axis=2)
    n_bad = int(np.count_nonzero(bad))
    if n_bad == 0:
        return matrix, 0
    weights = q8_0.dequantize(blocks[bad], matrix.d[bad], n_bad, BLOCK)
    anew = q8_0.quantize(weights, scale_f16=True)
    q, d = blocks.copy(), matrix.d.copy()
    q[bad], d[bad] = anew.q, anew.d[:, 0]
    return Quantized(q.reshape(rows, -1), d), n_bad


def zero_blocks(encoding: str, rows: int, n_blocks: int) -> Quantized:
    """Blocks that stand for zeros."""
    if encoding == "q8_0":
        q: npt.NDArray[np.int8] | Bytes = np.zeros((rows, n_blocks * BLOCK), np.int8)
    else:
        q = np.full((rows, n_blocks * BLOCK // 2), 0x88, np.uint8)
    return Quantized(q, np.zeros((rows, n_blocks), np.float16))
