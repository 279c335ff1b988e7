"""Matrix-vector products of Q4_0 as in :mod:`~krafla_cli.kernels.matvec`, for processors with AVX-512 VNNI.

Half the instructions, so that more of the memory is on its way at once: a load takes four blocks of a row, and one
instruction multiplies 64 weights and adds the products by fours. Blocks that are left at the end of a row go through
the other kernel's code. (Q8_0 has nothing to gain: there the other kernel waits for nothing but the memory.)
"""

from __future__ import annotations

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.matvec import block_sums_q4_0, prefetch_lines, run_tiles
from krafla_cli.kernels.operations import LANES
from krafla_cli.kernels.rows import add_block, row_pointers
from krafla_cli.kernels.simd import (
    advance,
    fma,
    high_nibbles,
    load_f32,
    load_two_rows,
    low_nibbles,
    spread_i16,
    to_f32,
    zero_f32,
)
from krafla_cli.kernels.simd_types import F32x8, F32x16, I8x64, I32x16, Operands, Pointer
from krafla_cli.kernels.simd_wide import (
    add_products,
    first_half,
    load_2_f32,
    load_4_i16,
    load_halves,
    load_i8x64,
    second_half,
    sums_of_4_blocks,
)


def matvec_q4_0(a: Operands, step: Operands, me: Operands) -> None:
    """Operation MATVEC["q4_0"]."""
    run_tiles(a, me, a.n_blocks * 16, _total_q4_0)


@inline
def _add_two_blocks(total: F32x8, scales: Pointer, b: int, scaled: F32x16) -> F32x8:
    """Blocks ``b`` and b + 1 of the chain: ``scaled`` is dx times the block's sums, of 8 rows each."""
    total = fma(load_f32(scales, b * LANES), first_half(scaled), total)
    return fma(load_f32(scales, (b + 1) * LANES), second_half(scaled), total)


@inline
def _total_q4_0(a: Operands, row: int, ahead: Pointer, scales: Pointer) -> F32x8:
    rows = row_pointers(a.q, row, a.n_rows, a.n_blocks * 16)
    second = advance(a.x, 16)
    total = zero_f32()
    n_whole = a.n_blocks // 4 * 4
    for b in range(0, n_whole, 4):
        prefetch_lines(ahead, 2 * b, 8, a.n_blocks * 16)
        i, low, high = 16 * b, load_halves(a.x, 32 * b), load_halves(second, 32 * b)
        start = load_4_i16(a.sx, b) >> 1  # in four sums of a block that makes -8 · Σ x
        sums = sums_of_4_blocks(
            _products_q4_0(load_i8x64(rows[0], i), low, high, start),
            _products_q4_0(load_i8x64(rows[1], i), low, high, start),
            _products_q4_0(load_i8x64(rows[2], i), low, high, start),
            _products_q4_0(load_i8x64(rows[3], i), low, high, start),
            _products_q4_0(load_i8x64(rows[4], i), low, high, start),
            _products_q4_0(load_i8x64(rows[5], i), low, high, start),
            _products_q4_0(load_i8x64(rows[6], i), low, high, start),
            _products_q4_0(load_i8x64(rows[7], i), low, high, start),
        )
        total = _add_two_blocks(total, scales, b, to_f32(sums[0]) * load_2_f32(a.dx, b))
        total = _add_two_blocks(total, scales, b + 2, to_f32(sums[1]) * load_2_f32(a.dx, b + 2))
    for b in range(n_whole, a.n_blocks):
        x_low = load_two_rows(a.x, a.x, 32 * b)
        x_high = load_two_rows(second, second, 32 * b)
        sums = block_sums_q4_0(rows, 16 * b, x_low, x_high, spread_i16(a.sx[b]))
        total = add_block(total, load_f32(scales, b * LANES), sums, a.dx[b])
    return total


@inline
def _products_q4_0(w: I8x64, low: I8x64, high: I8x64, start: I32x16) -> I32x16:
    """Four blocks of a row: low nibbles times x[0:16], high ones times x[16:32], added by eights."""
    return add_products(add_products(start, low_nibbles(w), low), high_nibbles(w), high)
