"""How far quantized rows are from their weights. Called through :mod:`~krafla_cli.kernels.quantize_rows`.

The difference of a weight and level · d is float32, as an engine's weights are; squares and sums are float64. In each
sum, element j of a block goes to partial j mod 8, a block's four elements of a partial added as (0+1)+(2+3), blocks
ascending; at the end of a row the partials are added ((0+4)+(2+6)) + ((1+5)+(3+7)).
"""

from __future__ import annotations

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.quantize import BLOCK, load_weights
from krafla_cli.kernels.simd import as_f16, as_f32, load_f16, load_f32, spread_f32, store_f32, to_f32
from krafla_cli.kernels.simd_quantize import (
    add_block_squares_f64,
    add_weighted_squares_f64,
    clear_f64,
    load_bytes,
    load_i8_f32,
    sum_f64,
)
from krafla_cli.kernels.simd_types import F32x8, Operands, Pointer

# Scratch memory, in floats: the scales of 8 blocks, as f16 as well; 8 float64 partials of each sum.
_HALVES = 8
_SQUARED_ERROR, _SQUARE, _WEIGHTED_ERROR, _WEIGHTED_SQUARE = 16, 32, 48, 64
_N_SUMS = 4


@inline
def _take_scales(a: Operands, block: int, n: int, scratch: Pointer) -> None:
    """The scales of ``n`` blocks as float32; f16 ones are converted 8 at a time, one would wait for the one before."""
    if a.scale_f16 == 0:
        for k in range(n):
            scratch[k] = as_f32(a.d)[block + k]
        return
    halves = as_f16(scratch)
    for k in range(n):
        halves[2 * _HALVES + k] = as_f16(a.d)[block + k]
    store_f32(scratch, 0, load_f16(halves, 2 * _HALVES))


@inline
def _add_block(
    a: Operands, block: int, column: int, scale: float, l0: F32x8, l1: F32x8, l2: F32x8, l3: F32x8, sums: Pointer
) -> None:
    """Adds one block with its levels to the sums."""
    i = block * BLOCK
    d = spread_f32(scale)
    x0, x1 = load_weights(a.w, a.kind, i), load_weights(a.w, a.kind, i + 8)
    x2, x3 = load_weights(a.w, a.kind, i + 16), load_weights(a.w, a.kind, i + 24)
    e0, e1, e2, e3 = x0 - l0 * d, x1 - l1 * d, x2 - l2 * d, x3 - l3 * d
    add_block_squares_f64(sums, _SQUARED_ERROR, e0, e1, e2, e3)
    add_block_squares_f64(sums, _SQUARE, x0, x1, x2, x3)
    if a.has_importance != 0:
        w0, w1 = load_f32(a.importance, column), load_f32(a.importance, column + 8)
        w2, w3 = load_f32(a.importance, column + 16), load_f32(a.importance, column + 24)
        add_weighted_squares_f64(sums, _WEIGHTED_ERROR, e0, e1, e2, e3, w0, w1, w2, w3)
        add_weighted_squares_f64(sums, _WEIGHTED_SQUARE, x0, x1, x2, x3, w0, w1, w2, w3)


@inline
def _begin_row(sums: Pointer) -> None:
    clear_f64(sums, _SQUARED_ERROR)
    clear_f64(sums, _SQUARE)
    clear_f64(sums, _WEIGHTED_ERROR)
    clear_f64(sums, _WEIGHTED_SQUARE)


@inline
def _end_row(a: Operands, row: int, sums: Pointer) -> None:
    """Without an importance the weighted sums are the others."""
    weighted = _WEIGHTED_ERROR - _SQUARED_ERROR if a.has_importance != 0 else 0
    out = row * _N_SUMS
    a.sums[out] = sum_f64(sums, _SQUARED_ERROR)
    a.sums[out + 1] = sum_f64(sums, _SQUARE)
    a.sums[out + 2] = sum_f64(sums, _SQUARED_ERROR + weighted)
    a.sums[out + 3] = sum_f64(sums, _SQUARE + weighted)


def errors_q8_0(a: Operands, begin: int, end: int, scratch: Pointer) -> None:
    """The sums of rows of Q8_0 blocks."""
    for row in range(begin, end):
        _begin_row(scratch)
        for b in range(0, a.n_blocks, 8):
            n = min(8, a.n_blocks - b)
            block = row * a.n_blocks + b
            _take_scales(a, block, n, scratch)
            for k in range(n):
                i = (block + k) * BLOCK
                l0, l1 = load_i8_f32(a.q, i), load_i8_f32(a.q, i + 8)
                l2, l3 = load_i8_f32(a.q, i + 16), load_i8_f32(a.q, i + 24)
                _add_block(a, block + k, (b + k) * BLOCK, scratch[k], l0, l1, l2, l3, scratch)
        _end_row(a, row, scratch)


def errors_q4_0(a: Operands, begin: int, end: int, scratch: Pointer) -> None:
    """The sums of rows of Q4_0 blocks."""
    for row in range(begin, end):
        _begin_row(scratch)
        for b in range(0, a.n_blocks, 8):
            n = min(8, a.n_blocks - b)
            block = row * a.n_blocks + b
            _take_scales(a, block, n, scratch)
            for k in range(n):
                i = (block + k) * (BLOCK // 2)
                first, second = load_bytes(a.q, i), load_bytes(a.q, i + 8)
                l0, l1 = to_f32((first & 15) - 8), to_f32((second & 15) - 8)
                l2, l3 = to_f32((first >> 4) - 8), to_f32((second >> 4) - 8)
                _add_block(a, block + k, (b + k) * BLOCK, scratch[k], l0, l1, l2, l3, scratch)
        _end_row(a, row, scratch)
