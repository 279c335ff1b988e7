"""Rows of the embedding table."""

from __future__ import annotations

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import as_f16, as_f32, load_f16, load_f32, spread_f32, store_f32
from krafla_cli.kernels.simd_types import Operands, Pointer
from krafla_cli.kernels.threads import next_unit

_BLOCK = 32


def embed_rows(a: Operands, step: Operands, me: Operands) -> None:
    """Operation EMBED_ROWS: quant · d, then · scale, both rounded."""
    n_blocks = a.n_cols // _BLOCK
    t = next_unit(me, 1)
    while t < step.n_tokens:
        first = step.ids[t] * n_blocks
        for b in range(n_blocks):
            o = t * a.n_cols + b * _BLOCK
            _quants(a, first + b, o)
            d = spread_f32(_scale(a, first + b, me.scratch))
            for i in range(o, o + _BLOCK, 8):
                store_f32(a.x, i, load_f32(a.x, i) * d * spread_f32(a.scale))
        t = next_unit(me, 1)


@inline
def _quants(a: Operands, block: int, o: int) -> None:
    """The whole numbers of a block, as float32 in x from ``o`` on."""
    for j in range(_BLOCK):
        if a.is_q4:
            byte = np.int64(a.q[block * 16 + j % 16])
            a.x[o + j] = np.float32(((byte >> (j // 16 * 4)) & 15) - 8)
        else:
            a.x[o + j] = np.float32(np.int8(a.q[block * _BLOCK + j]))


@inline
def _scale(a: Operands, block: int, scratch: Pointer) -> float:
    if not a.is_f16:
        return as_f32(a.d)[block]
    as_f16(scratch)[0] = as_f16(a.d)[block]
    store_f32(as_f32(scratch), 0, load_f16(as_f16(scratch), 0))
    return as_f32(scratch)[0]
