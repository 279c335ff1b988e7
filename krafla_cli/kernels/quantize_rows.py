"""Quantization of rows by the kernels, on one thread or several: what :mod:`krafla_cli.quant` calls.

A kernel quantizes some rows of a matrix in the float32 order of the specification; each row's result depends on nothing
but the row, so that any number of threads gives the same bytes. Calls may overlap.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.kernels.cores import physical_cores
from krafla_cli.kernels.native import Native
from krafla_cli.kernels.structs import address, struct
from krafla_cli.kernels.team import aligned_zeros

# Arrays of [rows, n_blocks] blocks of 32: ``w`` the weights' bytes, of type ``kind`` (the value of WEIGHT_KINDS);
# ``importance`` float32 [cols] of the input channels, or null. Results: ``q`` the quants; ``d`` the scales, f16 if
# ``scale_f16``, else float32; ``bad_block`` [rows] the first block of the row that cannot be stored, else -1.
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
)
WEIGHT_KINDS = {"float32": 0, "uint16": 1, "float16": 2}  # uint16 holds the bits of bfloat16
_PARAMS = (ROWS, "i64", "i64", "f32*")  # the rows from, to; scratch memory
SCRATCH_FLOATS = 9216

Q8_0 = Native("quantize", "quantize_q8_0", _PARAMS)
Q4_0_FIT = Native("quantize_q4", "quantize_q4_0_fit", _PARAMS)
Q4_0_ROUND = Native("quantize_q4", "quantize_q4_0_round", _PARAMS)
Q4_0_BEST = Native("quantize_best", "quantize_q4_0_best", _PARAMS)

_WEIGHTS_PER_PIECE = 1 << 19
_ROWS_PER_TILE = 8


def quantize_rows(
    kernel: Native,
    w: npt.NDArray[Any],
    q: npt.NDArray[Any],
    d: npt.NDArray[Any],
    importance: npt.NDArray[np.float32] | None = None,
    n_threads: int | None = None,
) -> npt.NDArray[np.int64]:
    """Runs ``kernel`` on the C-contiguous matrix ``w`` [rows, cols] of a dtype of WEIGHT_KINDS, at any alignment.

    Fills ``q`` (bytes, in the layout of the file) and ``d`` float16 or float32 [rows, cols / 32]; returns ``bad_block``
    int64 [rows]. ``n_threads``: None for the physical cores.
    """
    bad_block = np.empty(w.shape[0], np.int64)
    rows = ROWS.pack(
        w=w,
        kind=WEIGHT_KINDS[w.dtype.name],
        n_blocks=d.shape[1],
        scale_f16=int(d.dtype == np.float16),
        importance=0 if importance is None else importance,
        has_importance=int(importance is not None),
        q=q,
        d=d,
        bad_block=bad_block,
    )

    def run(piece: range) -> None:
        scratch = aligned_zeros((SCRATCH_FLOATS,), np.float32)
        kernel(address(rows), piece.start, piece.stop, scratch)

    pieces = _pieces(*w.shape)
    n_workers = min(n_threads or physical_cores(), len(pieces))
    if n_workers < 2:
        for piece in pieces:
            run(piece)
        return bad_block
    with ThreadPoolExecutor(n_workers) as pool:
        list(pool.map(run, pieces))
    return bad_block


def _pieces(n_rows: int, n_cols: int) -> list[range]:
    """The rows in pieces of about half a million weights, whole tiles each."""
    tiles = max(1, _WEIGHTS_PER_PIECE // (n_cols * _ROWS_PER_TILE))
    step = tiles * _ROWS_PER_TILE
    return [range(first, min(first + step, n_rows)) for first in range(0, n_rows, step)]
