"""The operations that kernels offer to programs, with their operands. No numba here: this is what callers import.

Shapes are those of one step: T = step.n_tokens positions. Codes of T inputs of ``n_cols`` channels are three arrays, made
by the activation quantizer: ``x`` int8 [T, n_cols], ``dx`` float32 [T, n_cols / 32] (scale of each block of 32) and
``sx`` int16 [T, n_cols / 32] (-4 times the sum of each block's codes). Arrays that a matrix-matrix product reads are padded
to a multiple of 4 positions.
"""

from __future__ import annotations

from krafla_cli.kernels.structs import struct
from krafla_cli.kernels.team import operation

BLOCK = 32
POSITIONS_PER_TILE = 4

# W [n_rows, n_blocks x 32] times the codes: y float32 [T, n_rows] is set, or added to where ``add`` is 1. ``q`` and ``d`` are
# quants and scales as they lie in the file, scales f16 or f32.
MATRIX = struct(
    "MATRIX",
    q="i8*",
    d="u8*",
    is_f16="i64",
    n_rows="i64",
    n_blocks="i64",
    x="i8*",
    dx="f32*",
    sx="i16*",
    y="f32*",
    add="i64",
)
MATVEC = {
    "q8_0": operation("matvec", "matvec_q8_0", MATRIX),
    "q4_0": operation("matvec", "matvec_q4_0", MATRIX),
}
MATMUL = {
    "q8_0": operation("matmul", "matmul_q8_0", MATRIX),
    "q4_0": operation("matmul", "matmul_q4_0", MATRIX),
}
