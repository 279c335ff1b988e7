"""The memory of the fast engine: what a step computes in, and what it remembers between steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.formats.mlb import BLOCK, Header
from krafla_cli.kernels.operations import CHUNK, LANES, POSITIONS_PER_TILE
from krafla_cli.kernels.team import aligned_zeros
from krafla_cli.runtime.engine import Float32s

_KV_DTYPES: dict[str, type[np.generic]] = {"f16": np.uint16, "f32": np.float32}


def padded(n: int, multiple: int) -> int:
    """``n`` rounded up to a multiple of ``multiple``."""
    return -(-n // multiple) * multiple


def _floats(*shape: int) -> Float32s:
    return aligned_zeros(shape, np.float32)


class Codes:
    """Quantized inputs of a matrix product; rows padded as the kernels read them."""

    def __init__(self, n_positions: int, n_channels: int) -> None:
        rows = padded(n_positions, POSITIONS_PER_TILE)
        self.codes = aligned_zeros((rows * n_channels,), np.int8)
        self.dx = _floats(rows * n_channels // BLOCK)
        self.sx = aligned_zeros((rows * n_channels // BLOCK,), np.int16)


class Buffers:
    """Activations of up to ``n_positions`` positions, float32 [n_positions, channels]; all layers use them in turn."""

    def __init__(self, header: Header, n_positions: int, n_ctx: int) -> None:
        h, n = header, n_positions
        has_linear = any(h.is_linear(layer) for layer in range(h.n_layers))
        mixed = max(h.q_dim, h.lin_v_size if has_linear else 0)
        self.n_positions = n
        self.x = _floats(n, h.dim)  # the residual
        self.normed = _floats(n, h.dim)
        self.y = _floats(n, h.dim if h.post_norms else 0)
        self.q = _floats(n, h.q_dim)
        self.k = _floats(n, h.kv_dim)
        self.v = _floats(n, h.kv_dim)
        self.mixed = _floats(n, mixed)  # what attention, or the delta rule, makes of the values
        self.parts = _floats(padded(n_ctx, CHUNK) // CHUNK, h.n_heads, LANES + padded(h.head_size, LANES))
        self.gate = _floats(n, h.hidden_dim)
        self.up = _floats(n, h.hidden_dim)
        self.codes = Codes(n, max(h.dim, mixed, h.hidden_dim))
        self.z = _floats(n, max(h.q_dim if h.attn_gate else 0, h.lin_v_size if has_linear else 0))
        self.channels = _floats(n, h.lin_qkv_size if has_linear else 0)
        self.convolved = _floats(n, h.lin_qkv_size if has_linear else 0)
        self.beta = _floats(n, h.lin_v_heads if has_linear else 0)
        self.decay = _floats(n, h.lin_v_heads if has_linear else 0)


class KvCache:
    """Keys and values of one layer, in the layout of kernels/heads.py. Memory is taken when it is first written."""

    def __init__(self, header: Header, n_ctx: int, kv: str) -> None:
        self.n_ctx = padded(n_ctx, CHUNK)
        self.is_f16 = kv == "f16"
        dtype = _KV_DTYPES[kv]
        n = header.n_kv_heads * self.n_ctx
        self.keys: npt.NDArray[Any] = aligned_zeros((n * header.head_size,), dtype)
        self.values: npt.NDArray[Any] = aligned_zeros((n * padded(header.head_size, LANES),), dtype)
        self.item_bytes = self.keys.itemsize


class RecurrentState:
    """The state of one linear-attention layer; the layout is that of kernels/delta.py."""

    def __init__(self, header: Header) -> None:
        h = header
        self.recent = _floats(h.lin_conv - 1, h.lin_qkv_size)
        self.memory = _floats(h.lin_v_heads, padded(h.lin_v_dim, LANES), h.lin_k_dim)

    def copy(self) -> tuple[Float32s, Float32s]:
        return self.recent.copy(), self.memory.copy()

    def set(self, saved: tuple[Float32s, Float32s]) -> None:
        self.recent[:], self.memory[:] = saved

    def clear(self) -> None:
        self.recent.fill(0)
        self.memory.fill(0)
