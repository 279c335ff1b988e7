"""What goes round LEMB's forward pass: batch after batch without Python, and vectors of the width that is wanted."""

from __future__ import annotations

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import advance, load_f32
from krafla_cli.kernels.simd_codes import fma_f64, total_f64, widen, zero_f64
from krafla_cli.kernels.simd_types import Operands, Pointer
from krafla_cli.kernels.text_operations import BATCH
from krafla_cli.kernels.threads import atomic_add, next_unit, run_program

_run_program = inline(run_program)
_BATCH_WORDS = len(BATCH.fields)


def run_batches(
    program: Pointer,
    n_operations: int,
    batches: Pointer,
    n_batches: int,
    taken: Pointer,
    member: Pointer,
    counters: Pointer,
    arrived: Pointer,
) -> None:
    """Function RUN_BATCHES."""
    batch = atomic_add(taken, 0, 1)
    while batch < n_batches:
        for i in range(n_operations):
            counters[i] = 0
        _run(program, n_operations, batches, batch, member, counters, arrived)
        batch = atomic_add(taken, 0, 1)


@inline
def _run(
    program: Pointer,
    n_operations: int,
    batches: Pointer,
    batch: int,
    member: Pointer,
    counters: Pointer,
    arrived: Pointer,
) -> None:
    step = batches[0] + 8 * _BATCH_WORDS * batch
    _run_program(program, 0, n_operations, step, member, counters[n_operations], arrived, 1)


def finish_texts(a: Operands, batch: Operands, me: Operands) -> None:
    """Operation FINISH."""
    text = next_unit(me, 1)
    while text < batch.n_texts and batch.width > 0:
        _normalize(advance(a.projected, text * a.stride), batch.width, advance(batch.out, text * batch.width))
        text = next_unit(me, 1)


@inline
def _normalize(x: Pointer, n: int, out: Pointer) -> None:
    """``n`` values divided by their length, in float64; zeros stay zeros."""
    total = zero_f64()
    n_8 = n // 8 * 8
    for i in range(0, n_8, 8):
        v = widen(load_f32(x, i))
        total = fma_f64(v, v, total)
    length = total_f64(total)
    for i in range(n_8, n):
        length += np.float64(x[i]) * np.float64(x[i])
    length = np.sqrt(length)
    if length == 0.0:
        length = 1.0
    for i in range(n):
        out[i] = np.float32(np.float64(x[i]) / length)
