"""The operations that kernels offer to programs, with their operands. No numba here: this is what callers import.

Shapes are those of one step: T = step.n_tokens positions. Codes of T inputs of ``n_cols`` channels are three arrays,
made by the activation quantizer: ``x`` int8 [T, n_cols], ``dx`` float32 [T, n_cols / 32] (scale of each block of 32)
and ``sx`` int16 [T, n_cols / 32] (-4 times the sum of each block's codes). Arrays that a matrix-matrix product reads
are padded to a multiple of 8 positions.
"""

from __future__ import annotations

from krafla_cli.kernels.features import AVX512
from krafla_cli.kernels.structs import struct
from krafla_cli.kernels.team import operation

BLOCK = 32
LANES = 8
POSITIONS_PER_TILE = 8  # the most positions that a matrix-matrix product runs together
TILE_BYTES = 1 << 14  # of a matrix, unpacked
PAD_BYTES = 256  # at the start of a thread's scratch memory: 8 short rows of scales, or 8 results
CHUNK = 256  # positions of attention that belong together
ATTENTION_ROWS = 32  # rows (query heads of positions) of one KV head that attention does together

# W [n_rows, n_blocks x 32] times the codes: y float32 [T, n_rows] is set, or added to where ``add`` is 1. ``q``, ``d``
# are the quants and scales as they lie in the file, scales f16 or f32.
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
_KIND = "_vnni" if AVX512 else ""
MATVEC = {
    "q8_0": operation("matvec", "matvec_q8_0", MATRIX),
    "q4_0": operation(f"matvec{_KIND}", "matvec_q4_0", MATRIX),
}
MATMUL = {
    "q8_0": operation(f"matmul{_KIND}", "matmul_q8_0", MATRIX),
    "q4_0": operation(f"matmul{_KIND}", "matmul_q4_0", MATRIX),
}

# Where codes go, in operands that quantize: ``codes``, ``dx``, ``sx``; ``place`` names the inputs in step.fault.
_CODES = {"codes": "i8*", "dx": "f32*", "sx": "i16*", "place": "i64"}

# Rows of the embedding table for step.ids, times ``scale``: x float32 [T, n_cols].
EMBED = struct("EMBED", q="u8*", d="u8*", is_f16="i64", is_q4="i64", n_cols="i64", scale="f64", x="f32*")
EMBED_ROWS = operation("embed", "embed_rows", EMBED)

# RMSNorm of x [T, n_cols] times ``weight``: out [T, n_cols] and its codes.
NORM = struct("NORM", x="f32*", weight="f32*", out="f32*", n_cols="i64", eps="f64", **_CODES)
NORM_QUANTIZE = operation("norms", "norm_quantize", NORM)

# x [T, n_cols] is increased by the RMSNorm of y times ``weight``.
NORM_SUM = struct("NORM_SUM", y="f32*", weight="f32*", x="f32*", n_cols="i64", eps="f64")
NORM_ADD = operation("norms", "norm_add", NORM_SUM)

# act(gate) · up [T, n_cols], in place of gate, and its codes. ``act`` as in the header: 0 SiLU, 1 GELU (tanh).
ACTIVATION = struct("ACTIVATION", gate="f32*", up="f32*", act="i64", n_cols="i64", **_CODES)
ACTIVATE_QUANTIZE = operation("activations", "activate_quantize", ACTIVATION)

# x [T, n_cols], times sigmoid(gate) in place where ``has_gate`` is 1, and its codes.
GATED = struct("GATED", x="f32*", gate="f32*", has_gate="i64", n_cols="i64", **_CODES)
GATE_QUANTIZE = operation("activations", "gate_quantize", GATED)

# Soft cap of x [T, n_cols] in place.
CAP = struct("CAP", x="f32*", n_cols="i64", cap="f64")
SOFT_CAP = operation("activations", "soft_cap_all", CAP)

# Queries [T, n_heads, head_dim] in place, keys and values [T, n_kv_heads, head_dim] into the cache of ``n_ctx``
# positions (f16 where ``is_f16`` is 1): bias, norm of each query and key head, RoPE on the first ``rot_dim`` dimensions
# (0: none) by the tables cos and sin [n_ctx, rot_dim / 2]. The layout of the cache is in heads.py.
HEADS = struct(
    "HEADS",
    q="f32*",
    k="f32*",
    v="f32*",
    n_heads="i64",
    n_kv_heads="i64",
    head_dim="i64",
    has_bias="i64",
    q_bias="f32*",
    k_bias="f32*",
    v_bias="f32*",
    has_norm="i64",
    q_norm="f32*",
    k_norm="f32*",
    eps="f64",
    rot_dim="i64",
    cos="f32*",
    sin="f32*",
    keys="u8*",
    values="u8*",
    is_f16="i64",
    n_ctx="i64",
)
PREPARE_HEADS = operation("heads", "prepare_heads", HEADS)

# Attention of queries q [T, n_heads, head_dim] over the cache: out [T, n_heads, head_dim]. ``window`` as in the header;
# ``item_bytes`` 2 or 4, the cache's. For one position, ATTEND leaves the parts of each chunk in ``parts`` [chunks,
# n_heads, 8 + head_dim padded to 8], and MERGE_CHUNKS puts them together: the same bits as for many positions.
ATTENTION = struct(
    "ATTENTION",
    q="f32*",
    out="f32*",
    keys="u8*",
    values="u8*",
    item_bytes="i64",
    n_heads="i64",
    n_kv_heads="i64",
    head_dim="i64",
    n_ctx="i64",
    window="i64",
    scale="f64",
    softcap="f64",
    parts="f32*",
)
ATTEND = {kv: operation("attention", f"attend_{kv}", ATTENTION) for kv in ("f16", "f32")}
MERGE_CHUNKS = operation("attention", "merge_chunks", ATTENTION)

# Linear attention, step by step as the specification numbers it. Channels are queries, keys, values: [T, n_channels].
CONVOLUTION = struct("CONVOLUTION", x="f32*", out="f32*", taps="f32*", recent="f32*", n_channels="i64", n_taps="i64")
CONVOLVE = operation("delta", "convolve", CONVOLUTION)
# beta and decay [T, n_v_heads] hold b and a before; the heads of x are normalized in place.
KEYS = struct(
    "KEYS",
    x="f32*",
    beta="f32*",
    decay="f32*",
    dt_bias="f32*",
    a_log="f32*",
    n_channels="i64",
    n_k_heads="i64",
    n_v_heads="i64",
    k_dim="i64",
    query_scale="f64",
)
NORMALIZE_KEYS = operation("delta", "normalize_keys", KEYS)
DELTA = struct(
    "DELTA",
    x="f32*",
    beta="f32*",
    decay="f32*",
    memory="f32*",
    out="f32*",
    n_channels="i64",
    n_k_heads="i64",
    n_v_heads="i64",
    k_dim="i64",
    v_dim="i64",
)
DELTA_RULE = operation("delta", "delta_rule", DELTA)
# x [T, n_v_heads, v_dim], normalized per head, times ``weight`` and silu(z), in place.
GATED_HEADS = struct("GATED_HEADS", x="f32*", z="f32*", weight="f32*", n_v_heads="i64", v_dim="i64", eps="f64")
NORM_GATE_HEADS = operation("delta", "norm_gate_heads", GATED_HEADS)


def scratch_bytes(n_cols: int, n_positions: int, head_dim: int) -> int:
    """Scratch memory that each thread needs for matrices of up to ``n_cols`` columns, positions and heads as given."""
    scales = 2 * LANES * 4 * max(n_cols // BLOCK, LANES)
    sums = 2 * LANES * 4 * (n_positions + POSITIONS_PER_TILE)
    part = head_dim + 2 * LANES  # rounded up generously
    attention = 4 * (ATTENTION_ROWS * (head_dim + 2 * part + CHUNK) + 2 * LANES * max(CHUNK, head_dim))
    return max(PAD_BYTES + TILE_BYTES + scales + sums, attention, 8 * part)
