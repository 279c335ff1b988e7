"""Scores of a query against the rows of a matrix, in float64: one sum for each row, in an order of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd import advance, as_f32, load_f32, prefetch
from krafla_cli.kernels.simd_codes import fma_f64, load_f64, load_int8_f64, total_f64, widen, zero_f64
from krafla_cli.kernels.simd_types import Operands, Pointer
from krafla_cli.kernels.threads import next_unit

_ROWS_PER_UNIT = 2048
_ROWS_AT_ONCE = 4
_PREFETCH_VALUES = 2048  # how far ahead: the processor itself stops at the borders of pages


def score_rows(a: Operands, step: Operands, me: Operands) -> None:
    """Operation SCORE_ROWS."""
    first = next_unit(me, _ROWS_PER_UNIT)
    while first < a.n_rows:
        end = min(first + _ROWS_PER_UNIT, a.n_rows)
        if a.is_int8:
            for row in range(first, end, _ROWS_AT_ONCE):
                _store_int8(a, row, end, _scores(a.rows, row, end, a.n_cols, a.query, load_int8_f64))
        else:
            for row in range(first, end, _ROWS_AT_ONCE):
                _store(a, row, end, _scores(as_f32(a.rows), row, end, a.n_cols, a.query, _load_f32))
        first = next_unit(me, _ROWS_PER_UNIT)


@inline
def _load_f32(p: Pointer, i: int) -> Any:
    return widen(load_f32(p, i))


@inline
def _scores(rows: Pointer, row: int, end: int, n: int, query: Pointer, load: Any) -> Any:
    """The sums of four rows from ``row`` on; those from ``end`` on repeat the last."""
    r0 = advance(rows, row * n)
    r1 = advance(rows, min(row + 1, end - 1) * n)
    r2 = advance(rows, min(row + 2, end - 1) * n)
    r3 = advance(rows, min(row + 3, end - 1) * n)
    s0 = s1 = s2 = s3 = zero_f64()
    n_8 = n // 8 * 8
    ahead = advance(r0, _PREFETCH_VALUES)
    for i in range(0, n_8, 8):
        prefetch(ahead, 4 * i)
        prefetch(ahead, 4 * i + 16)
        q = load_f64(query, i)
        s0 = fma_f64(load(r0, i), q, s0)
        s1 = fma_f64(load(r1, i), q, s1)
        s2 = fma_f64(load(r2, i), q, s2)
        s3 = fma_f64(load(r3, i), q, s3)
    t0, t1, t2, t3 = total_f64(s0), total_f64(s1), total_f64(s2), total_f64(s3)
    for i in range(n_8, n):
        t0 += np.float64(r0[i]) * query[i]
        t1 += np.float64(r1[i]) * query[i]
        t2 += np.float64(r2[i]) * query[i]
        t3 += np.float64(r3[i]) * query[i]
    return t0, t1, t2, t3


@inline
def _store(a: Operands, row: int, end: int, sums: Any) -> None:
    a.scores[row] = sums[0]
    if row + 1 < end:
        a.scores[row + 1] = sums[1]
    if row + 2 < end:
        a.scores[row + 2] = sums[2]
    if row + 3 < end:
        a.scores[row + 3] = sums[3]


@inline
def _store_int8(a: Operands, row: int, end: int, sums: Any) -> None:
    a.scores[row] = a.scales[row] * sums[0]
    if row + 1 < end:
        a.scores[row + 1] = a.scales[row + 1] * sums[1]
    if row + 2 < end:
        a.scores[row + 2] = a.scales[row + 2] * sums[2]
    if row + 3 < end:
        a.scores[row + 3] = a.scales[row + 3] * sums[3]
