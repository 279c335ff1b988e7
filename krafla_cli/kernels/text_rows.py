"""Rows of the embedding table of LEMB models."""

from __future__ import annotations

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import advance, as_f32, load_f32, spread_f32, store_f32
from krafla_cli.kernels.simd_codes import load_int4, load_int8, load_ternary
from krafla_cli.kernels.simd_types import Operands, Pointer
from krafla_cli.kernels.text_operations import ENCODINGS
from krafla_cli.kernels.threads import next_unit

_ROWS_PER_UNIT = 64
_FP32, _INT8, _INT4 = ENCODINGS["fp32"], ENCODINGS["int8"], ENCODINGS["int4"]


def look_up(a: Operands, batch: Operands, me: Operands) -> None:
    """Operation LOOK_UP."""
    first = next_unit(me, _ROWS_PER_UNIT)
    while first < batch.n_tokens:
        for t in range(first, min(first + _ROWS_PER_UNIT, batch.n_tokens)):
            token = batch.ids[t]
            row = advance(a.rows, token * a.row_bytes)
            out = advance(a.x, t * a.stride)
            if a.encoding == _FP32:
                for i in range(0, a.n_cols, 8):
                    store_f32(out, i, load_f32(as_f32(row), i))
            else:
                _dequantize(a, row, a.scales[token], out)
            for i in range(a.n_cols, a.stride):
                out[i] = 0
        first = next_unit(me, _ROWS_PER_UNIT)


@inline
def _dequantize(a: Operands, row: Pointer, scale: float, out: Pointer) -> None:
    """codes · scale."""
    d = spread_f32(scale)
    if a.encoding == _INT8:
        for i in range(0, a.n_cols, 8):
            store_f32(out, i, load_int8(row, i) * d)
    elif a.encoding == _INT4:
        for i in range(0, a.n_cols, 8):
            store_f32(out, i, load_int4(row, i // 2) * d)
    else:
        for i in range(0, a.n_cols, 8):
            store_f32(out, i, load_ternary(row, i // 4) * d)
