"""Operations between matrix products that treat every value alike: activation functions, gates, soft caps."""

from __future__ import annotations

from krafla_cli.kernels.codes import BLOCK, quantize_block
from krafla_cli.kernels.functions import gelu_tanh, sigmoid, silu, soft_cap
from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import as_f32, load_f32, store_f32
from krafla_cli.kernels.simd_types import Operands
from krafla_cli.kernels.threads import next_unit

_UNIT_BLOCKS = 16
_UNIT_VALUES = 4096


def activate_quantize(a: Operands, step: Operands, me: Operands) -> None:
    """Operation ACTIVATE_QUANTIZE. A unit is 16 blocks of all positions counted through."""
    n_blocks = step.n_tokens * a.n_cols // BLOCK
    first = next_unit(me, _UNIT_BLOCKS)
    while first < n_blocks:
        for block in range(first, min(first + _UNIT_BLOCKS, n_blocks)):
            for i in range(block * BLOCK, (block + 1) * BLOCK, 8):
                gate = load_f32(a.gate, i)
                gate = silu(gate) if a.act == 0 else gelu_tanh(gate)
                store_f32(a.gate, i, gate * load_f32(a.up, i))
            quantize_block(a.gate, block * BLOCK, a, block, step)
        first = next_unit(me, _UNIT_BLOCKS)


def gate_quantize(a: Operands, step: Operands, me: Operands) -> None:
    """Operation GATE_QUANTIZE."""
    n_blocks = step.n_tokens * a.n_cols // BLOCK
    first = next_unit(me, _UNIT_BLOCKS)
    while first < n_blocks:
        for block in range(first, min(first + _UNIT_BLOCKS, n_blocks)):
            if a.has_gate:
                _gate_block(a, block)
            quantize_block(a.x, block * BLOCK, a, block, step)
        first = next_unit(me, _UNIT_BLOCKS)


@inline
def _gate_block(a: Operands, block: int) -> None:
    for i in range(block * BLOCK, (block + 1) * BLOCK, 8):
        store_f32(a.x, i, load_f32(a.x, i) * sigmoid(load_f32(a.gate, i)))


def soft_cap_all(a: Operands, step: Operands, me: Operands) -> None:
    """Operation SOFT_CAP; the last values, fewer than 8, go through scratch memory."""
    n = step.n_tokens * a.n_cols
    first = next_unit(me, _UNIT_VALUES)
    while first < n:
        end = min(first + _UNIT_VALUES, n)
        whole = first + (end - first) // 8 * 8
        for i in range(first, whole, 8):
            store_f32(a.x, i, soft_cap(load_f32(a.x, i), a.cap))
        _cap_rest(a, whole, end, me)
        first = next_unit(me, _UNIT_VALUES)


@inline
def _cap_rest(a: Operands, first: int, end: int, me: Operands) -> None:
    from_scratch = as_f32(me.scratch)
    for i in range(first, end):
        from_scratch[i - first] = a.x[i]
    if first < end:
        store_f32(from_scratch, 0, soft_cap(load_f32(from_scratch, 0), a.cap))
    for i in range(first, end):
        a.x[i] = from_scratch[i - first]
