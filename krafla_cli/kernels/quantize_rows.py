"""Quantization of rows by the kernels, and the error that it makes: what :mod:`krafla_cli.quant` calls.

A kernel works on rows of a matrix, on the calling thread, in the float order of the specification; each row's result
depends on nothing but the row. Calls may overlap: other Python threads run meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.kernels.native import Native
from krafla_cli.kernels.structs import address, struct
from krafla_cli.kernels.team import aligned_zeros

# Arrays of [rows, n_blocks] blocks of 32: ``w`` the weights' bytes, of type ``kind`` (the value of WEIGHT_KINDS);
# ``importance`` float32 [cols] of the input channels, or null; ``q`` the quants; ``d`` the scales, f16 if
# ``scale_f16``, else float32. Results besides q and d: ``bad_block`` [rows] the first block of the row that cannot be
# stored, else -1; ``sums`` float64 [rows, N_SUMS] of the errors.
ROWS = struct(
    "ROWS",
    w="u8*",
    kind="i64",
    n_blocks="i64",
    scale_f16="i64",
    importance="f32*",
    has_importance="i64",
    q="i8*",
    d="u8*",
    bad_block="i64*",
    sums="f64*",
)
WEIGHT_KINDS = {"float32": 0, "uint16": 1, "float16": 2}  # uint16 holds the bits of bfloat16
_PARAMS = (ROWS, "i64", "i64", "f32*")  # the rows from, to; scratch memory
SCRATCH_FLOATS = 9216
N_SUMS = 4

Q8_0 = Native("quantize", "quantize_q8_0", _PARAMS)
Q4_0_FIT = Native("quantize_q4", "quantize_q4_0_fit", _PARAMS)
Q4_0_ROUND = Native("quantize_q4", "quantize_q4_0_round", _PARAMS)
Q4_0_BEST = Native("quantize_best", "quantize_q4_0_best", _PARAMS)
_ERRORS = {"q8_0": Native("quantize_error", "errors_q8_0", _PARAMS)} | {
    "q4_0": Native("quantize_error", "errors_q4_0", _PARAMS)
}


def quantize_rows(
    kernel: Native,
    w: npt.NDArray[Any],
    q: npt.NDArray[Any],
    d: npt.NDArray[Any],
    importance: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.int64]:
    """Runs ``kernel`` on the C-contiguous matrix ``w`` [rows, cols] of a dtype of WEIGHT_KINDS, at any alignment.

    Fills ``q`` (bytes, in the layout of the file) and ``d`` float16 or float32 [rows, cols / 32], C-contiguous; returns
    ``bad_block`` int64 [rows].
    """
    bad_block = np.empty(w.shape[0], np.int64)
    _run(kernel, w, q, d, importance, bad_block=bad_block)
    return bad_block


def row_errors(
    encoding: str,
    w: npt.NDArray[Any],
    q: npt.NDArray[Any],
    d: npt.NDArray[Any],
    importance: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float64]:
    """How far quantized rows are from ``w``: float64 [rows, N_SUMS], the sums over a row of

    (w - level · d)², w², and both times ``importance`` (1 where there is none). The difference is taken in float32, as
    a runtime's weights are; squares and sums are float64, in a fixed order. Arrays as for :func:`quantize_rows`.
    """
    sums = np.empty((w.shape[0], N_SUMS), np.float64)
    _run(_ERRORS[encoding], w, q, d, importance, sums=sums)
    return sums


def _run(
    kernel: Native,
    w: npt.NDArray[Any],
    q: npt.NDArray[Any],
    d: npt.NDArray[Any],
    importance: npt.NDArray[np.float32] | None,
    **results: npt.NDArray[Any],
) -> None:
    rows = ROWS.pack(
        w=w,
        kind=WEIGHT_KINDS[w.dtype.name],
        n_blocks=d.shape[1],
        scale_f16=int(d.dtype == np.float16),
        importance=0 if importance is None else importance,
        has_importance=int(importance is not None),
        q=q,
        d=d,
        **results,
    )
    kernel(address(rows), 0, w.shape[0], aligned_zeros((SCRATCH_FLOATS,), np.float32))
