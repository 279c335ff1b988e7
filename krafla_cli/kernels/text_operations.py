"""The operations of LEMB's forward pass (its specification, section 6) and of the search.

Their operands, and how matrices are laid out for them. No numba here: this is what callers import. Texts of
a batch lie one after the other, a row for each token: T rows, T = batch.n_tokens. The rows of every float32 array are
``stride`` values apart, a multiple of ``PAD``, and zero behind the ``n_cols`` that count; arrays have room for a
multiple of 4 rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from krafla_cli.kernels.native import Native, Param
from krafla_cli.kernels.structs import Struct, struct
from krafla_cli.kernels.team import MEMBER, aligned_zeros

PAD = 32
ROWS_PER_TILE = 16  # rows of a matrix that products take together
ROWS_AT_ONCE = 4  # rows of activations that they take together
LANES = 8

# What changes from batch to batch: ``ids`` [T]; text i is the rows starts[i] to starts[i + 1], i < n_texts; and where
# vectors go, ``out`` [n_texts, width], if width is not 0.
BATCH = struct("BATCH", n_tokens="i64", n_texts="i64", ids="i64*", starts="i64*", width="i64", out="f32*")


def _operation(module: str, name: str, operands: Struct) -> Native:
    params: tuple[Param, ...] = (operands, BATCH, MEMBER)
    return Native(module, name, params)


def padded(n: int) -> int:
    """``n`` rounded up to a multiple of PAD."""
    return -(-n // PAD) * PAD


# Rows of the embedding table for batch.ids, dequantized: x [T, stride]. ``encoding`` is the header's number; rows are
# ``row_bytes`` apart and may be read in whole vectors of 8 elements.
ENCODINGS = {"fp32": 0, "int8": 1, "int4": 2, "ternary": 3}
TABLE = struct(
    "TABLE", encoding="i64", rows="u8*", row_bytes="i64", scales="f32*", x="f32*", n_cols="i64", stride="i64"
)
LOOK_UP = _operation("text_rows", "look_up", TABLE)

# What comes before a linear layer: x [T, stride] as it is, its LayerNorm times ``weight`` plus ``bias``, or its GELU,
# to ``out`` (may be x); where ``quantize`` is 1 also section 6.3's codes + 128, uint8 [T, stride], and x_scale [T].
PLAIN, NORM, GELU = 0, 1, 2
INPUT = struct(
    "INPUT",
    before="i64",
    x="f32*",
    weight="f32*",
    bias="f32*",
    out="f32*",
    n_cols="i64",
    stride="i64",
    quantize="i64",
    codes="u8*",
    x_scale="f32*",
)
PREPARE = _operation("layer_norm", "prepare_rows", INPUT)

# Ternary weights times codes: y [T, y_stride] is set to (codes Wt + bias) / (scale x_scale), or increased by it where
# ``add`` is 1. ``q`` is laid out by ternary_tiles, ``offset`` holds 128 times the sum of each row of W.
TERNARY = struct(
    "TERNARY",
    q="i8*",
    n_groups="i64",
    n_tiles="i64",
    offset="i32*",
    bias="f32*",
    scale="f64",
    codes="u8*",
    x_stride="i64",
    x_scale="f32*",
    y="f32*",
    y_stride="i64",
    add="i64",
)
TERNARY_PRODUCT = _operation("ternary", "multiply_ternary", TERNARY)

# float32 weights: y [T, y_stride] is set to x Wt + bias, or increased by it; with ``over_texts`` rows are texts, not
# tokens. ``w`` is laid out by dense_tiles.
DENSE = struct(
    "DENSE",
    w="f32*",
    n_cols="i64",
    n_tiles="i64",
    bias="f32*",
    x="f32*",
    x_stride="i64",
    y="f32*",
    y_stride="i64",
    add="i64",
    over_texts="i64",
)
DENSE_PRODUCT = _operation("dense", "multiply_dense", DENSE)

# softmax(Q Kt scale) V per head and text: qkv [T, 3 stride] -> out [T, stride].
ATTENTION = struct("TEXT_ATTENTION", qkv="f32*", out="f32*", n_heads="i64", head_dim="i64", stride="i64", scale="f64")
ATTEND = _operation("text_attention", "attend_texts", ATTENTION)

# The mean of a text's rows after LayerNorm, times ``weight`` plus ``bias``: out [texts, stride].
POOLING = struct("POOLING", x="f32*", weight="f32*", bias="f32*", out="f32*", n_cols="i64", stride="i64")
POOL = _operation("layer_norm", "pool_texts", POOLING)

# The first batch.width values of projected [texts, stride], divided by their length, to batch.out.
FINISHING = struct("FINISHING", projected="f32*", stride="i64")
FINISH = _operation("text_batches", "finish_texts", FINISHING)

# Takes batches, by the counter ``taken`` that threads share, and runs a program of one thread on each: its table and
# number of operations; the address of an array of BATCH structs, and their number; taken; the member, the operations'
# counters with their own address behind them, and the count of arrivals.
RUN_BATCHES = Native("text_batches", "run_batches", ("i64*", "i64", "i64*", "i64", "i64*", "i64*", "i64*", "i64*"))

# The search: rows [n_rows, n_cols] float32, or int8 each times its scale, times the query: scores [n_rows], in float64.
MATCHES = struct(
    "MATCHES",
    rows="i8*",
    is_int8="i64",
    scales="f32*",
    query="f64*",
    n_rows="i64",
    n_cols="i64",
    scores="f64*",
)
SCORE_ROWS = _operation("search", "score_rows", MATCHES)


def attention_scratch_bytes(n_tokens: int, head_dim: int) -> int:
    """Scratch memory for the attention of a text of ``n_tokens``: transposed keys, scores of 8 queries, one output."""
    n_keys = -(-n_tokens // LANES) * LANES
    return 4 * (n_keys * head_dim + LANES * n_keys + padded(head_dim))


def product_scratch_bytes(n_rows: int) -> int:
    """Scratch memory for a product of ``n_rows`` rows of activations."""
    return 4 * padded(n_rows)


# ---------------------------------------------------------------------------------------------------------------------
# Matrices, laid out once when a model is opened

_CODES = np.array([0, 1, -1, 0], np.int8)  # by 2-bit code; 3 is reserved and has been refused
_ALL_BYTES = np.arange(256, dtype=np.uint8)
_FOURS = np.stack([_CODES[(_ALL_BYTES >> shift) & 3] for shift in (0, 2, 4, 6)], axis=1)  # [256, 4] int8
_WORDS = _FOURS.reshape(-1).view(np.uint32)  # the four weights of a byte, as one number
_SUMS = _FOURS.sum(axis=1, dtype=np.int8)


def ternary_tiles(packed: npt.NDArray[np.uint8], stride: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """Weights packed four to a byte [rows, groups] as int8 [stride / 16, groups, 16, 4]; and 128 times each row's sum.

    That is: for 16 rows, four columns of each row, then the next four of each. Rows up to ``stride`` are zero.
    """
    n_rows, n_groups = packed.shape
    tiles = aligned_zeros((stride // ROWS_PER_TILE, n_groups, ROWS_PER_TILE), np.uint32)
    n_whole = n_rows // ROWS_PER_TILE
    words = _WORDS[packed]
    split = n_whole * ROWS_PER_TILE
    tiles[:n_whole] = words[:split].reshape(n_whole, ROWS_PER_TILE, n_groups).transpose(0, 2, 1)
    if split < n_rows:
        tiles[n_whole, :, : n_rows - split] = words[split:].T
    offsets = np.zeros(stride, np.int32)
    offsets[:n_rows] = 128 * _SUMS[packed].sum(axis=1, dtype=np.int32)
    return tiles.view(np.int8), offsets


def dense_tiles(weight: npt.NDArray[np.float32], stride: int) -> npt.NDArray[np.float32]:
    """float32 weights [rows, columns] as [stride / 16, columns, 16]; rows up to ``stride`` are zero."""
    n_rows, n_cols = weight.shape
    tiles = aligned_zeros((stride // ROWS_PER_TILE, n_cols, ROWS_PER_TILE), np.float32)
    for tile in range(-(-n_rows // ROWS_PER_TILE)):
        rows = weight[tile * ROWS_PER_TILE : (tile + 1) * ROWS_PER_TILE]
        tiles[tile, :, : len(rows)] = rows.T
    return tiles


def padded_vector(values: npt.NDArray[np.float32] | None, stride: int) -> npt.NDArray[np.float32]:
    """``values``, followed by zeros up to ``stride``; all zeros for None."""
    out = np.zeros(stride, np.float32)
    if values is not None:
        out[: len(values)] = values
    return out
