"""Which tensors of a Hugging Face checkpoint a .mlb is made of, by family: names, row orders, norms.

The one place for it: conversion reads checkpoints by these tables and export writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.formats.gguf_names import Architecture
from krafla_cli.formats.mlb import Header

RowOrder = Callable[[Header], npt.NDArray[np.intp]]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Part:
    """Where one tensor of the .mlb comes from.

    ``name``: the checkpoint's name without the model's prefix, "{i}" for the layer. ``rows``: which of the
    checkpoint's rows, in the checkpoint's own (rotate-half) order; all where None. ``source_rows``: how many rows
    the checkpoint's tensor has then. Both are given the header with hidden_dim as the checkpoint has it.
    ``plus_one``: the checkpoint stores w and multiplies by (1 + w). ``middle_axis``: the checkpoint has an axis of
    size 1 between rows and columns (convolutions). ``columns``: which of the checkpoint's columns, in its order; all
    where None. ``kept_as``: the checkpoint stores another function of the values; None: the values.
    """

    name: str
    rows: RowOrder | None = None
    source_rows: Callable[[Header], int] | None = None
    plus_one: bool = False
    middle_axis: bool = False
    columns: RowOrder | None = None
    kept_as: Transform | None = None


@dataclass(frozen=True)
class Transform:
    """A function of the values, from the checkpoint to the .mlb (``load``) and back (``save``), both in float32."""

    load: Callable[[Float32s], Float32s]
    save: Callable[[Float32s], Float32s]


Parts = Mapping[str, Part]


@dataclass(frozen=True)
class CheckpointLayout:
    """The tensors of one family: role -> part; ``interleaved``: rows of q and k lie in pairs, as in .mlb."""

    parts: Parts
    interleaved: bool = False


def _rows(start: int, count: int) -> npt.NDArray[np.intp]:
    return np.arange(start, start + count, dtype=np.intp)


_LLAMA: dict[str, Part] = {
    "tok_emb": Part("embed_tokens.weight"),
    "attn_norm": Part("layers.{i}.input_layernorm.weight"),
    "wq": Part("layers.{i}.self_attn.q_proj.weight"),
    "wk": Part("layers.{i}.self_attn.k_proj.weight"),
    "wv": Part("layers.{i}.self_attn.v_proj.weight"),
    "wo": Part("layers.{i}.self_attn.o_proj.weight"),
    "ffn_norm": Part("layers.{i}.post_attention_layernorm.weight"),
    "w1": Part("layers.{i}.mlp.gate_proj.weight"),
    "w2": Part("layers.{i}.mlp.down_proj.weight"),
    "w3": Part("layers.{i}.mlp.up_proj.weight"),
    "final_norm": Part("norm.weight"),
    "wcls": Part("lm_head.weight"),
}
_QKV_BIAS: dict[str, Part] = {
    "bq": Part("layers.{i}.self_attn.q_proj.bias"),
    "bk": Part("layers.{i}.self_attn.k_proj.bias"),
    "bv": Part("layers.{i}.self_attn.v_proj.bias"),
}
_QK_NORM: dict[str, Part] = {
    "q_norm": Part("layers.{i}.self_attn.q_norm.weight"),
    "k_norm": Part("layers.{i}.self_attn.k_norm.weight"),
}


def _plus_one(parts: Parts) -> dict[str, Part]:
    return {role: Part(part.name, plus_one=True) for role, part in parts.items()}


# Gemma multiplies by (1 + w) and has a norm before and after attention and FFN.
_GEMMA_NORMS = _plus_one(
    {
        "attn_norm": Part("layers.{i}.input_layernorm.weight"),
        "post_attn_norm": Part("layers.{i}.post_attention_layernorm.weight"),
        "ffn_norm": Part("layers.{i}.pre_feedforward_layernorm.weight"),
        "post_ffn_norm": Part("layers.{i}.post_feedforward_layernorm.weight"),
        "final_norm": Part("norm.weight"),
    }
)

# Phi-3 keeps q, k, v in one matrix and gate, up in another; GLM only the latter.
_QKV_PROJ = "layers.{i}.self_attn.qkv_proj.weight"
_GATE_UP_PROJ = "layers.{i}.mlp.gate_up_proj.weight"


def _qkv_rows(header: Header) -> int:
    return header.q_dim + 2 * header.kv_dim


_QKV: dict[str, Part] = {
    "wq": Part(_QKV_PROJ, lambda h: _rows(0, h.q_dim), _qkv_rows),
    "wk": Part(_QKV_PROJ, lambda h: _rows(h.q_dim, h.kv_dim), _qkv_rows),
    "wv": Part(_QKV_PROJ, lambda h: _rows(h.q_dim + h.kv_dim, h.kv_dim), _qkv_rows),
}
_GATE_UP: dict[str, Part] = {
    "w1": Part(_GATE_UP_PROJ, lambda h: _rows(0, h.hidden_dim), lambda h: 2 * h.hidden_dim),
    "w3": Part(_GATE_UP_PROJ, lambda h: _rows(h.hidden_dim, h.hidden_dim), lambda h: 2 * h.hidden_dim),
}
_GLM_POST_NORMS: dict[str, Part] = {
    "post_attn_norm": Part("layers.{i}.post_self_attn_layernorm.weight"),
    "post_ffn_norm": Part("layers.{i}.post_mlp_layernorm.weight"),
}


def _heads(header: Header) -> npt.NDArray[np.intp]:
    """Qwen3.5's q_proj holds, for each head, its query rows and then its gate rows: [heads, 2, head size]."""
    return np.arange(2 * header.q_dim).reshape(header.n_heads, 2, header.head_size)


_Q_PROJ = "layers.{i}.self_attn.q_proj.weight"
_DELTA = "layers.{i}.linear_attn."
_QWEN3_5: dict[str, Part] = {
    **_plus_one({role: _LLAMA[role] for role in ("attn_norm", "ffn_norm", "final_norm")}),
    **_plus_one(_QK_NORM),
    "wq": Part(_Q_PROJ, rows=lambda h: _heads(h)[:, 0].reshape(-1), source_rows=lambda h: 2 * h.q_dim),
    "wg": Part(_Q_PROJ, rows=lambda h: _heads(h)[:, 1].reshape(-1), source_rows=lambda h: 2 * h.q_dim),
    "lqkv": Part(_DELTA + "in_proj_qkv.weight"),
    "lz": Part(_DELTA + "in_proj_z.weight"),
    "lb": Part(_DELTA + "in_proj_b.weight"),
    "la": Part(_DELTA + "in_proj_a.weight"),
    "lconv": Part(_DELTA + "conv1d.weight", middle_axis=True),
    "dt_bias": Part(_DELTA + "dt_bias"),
    "A_log": Part(_DELTA + "A_log"),
    # The gated norm of the output multiplies by w as it is, unlike the other norms.
    "lnorm": Part(_DELTA + "norm.weight"),
    "lout": Part(_DELTA + "out_proj.weight"),
}


def _value_heads(header: Header, size: int) -> npt.NDArray[np.intp]:
    """Where llama.cpp keeps ``size`` entries of each value head: those of one key head are not neighbours.

    Value head v = k r + j uses key head k of K, r value heads each; there it is head j K + k.
    """
    per_key = header.lin_v_heads // header.lin_k_heads
    heads = np.arange(header.lin_v_heads, dtype=np.intp)
    places = heads % per_key * header.lin_k_heads + heads // per_key
    return (places[:, None] * size + np.arange(size)).reshape(-1)


def _channels(header: Header) -> npt.NDArray[np.intp]:
    """The same for the channels of queries, keys (as they are) and values."""
    n_before = 2 * header.lin_k_heads * header.lin_k_dim
    return np.concatenate([np.arange(n_before), n_before + _value_heads(header, header.lin_v_dim)])


def _log_of_minus(values: Float32s) -> Float32s:
    with np.errstate(invalid="ignore", divide="ignore"):  # what is not below 0 becomes NaN or infinite, and is refused
        return np.log(-values.astype(np.float64)).astype(np.float32)


def _minus_exp(values: Float32s) -> Float32s:
    return (-np.exp(values.astype(np.float64))).astype(np.float32)


LAYOUTS: dict[str, CheckpointLayout] = {
    "llama": CheckpointLayout(_LLAMA),
    "mistral": CheckpointLayout(_LLAMA),
    "ministral": CheckpointLayout(_LLAMA),
    "ministral3": CheckpointLayout(_LLAMA),
    "qwen2": CheckpointLayout(_LLAMA | _QKV_BIAS),
    "qwen3": CheckpointLayout(_LLAMA | _QK_NORM),
    "qwen3_5": CheckpointLayout(_LLAMA | _QWEN3_5),
    "gemma2": CheckpointLayout(_LLAMA | _GEMMA_NORMS),
    "gemma3": CheckpointLayout(_LLAMA | _GEMMA_NORMS | _plus_one(_QK_NORM)),
    "smollm3": CheckpointLayout(_LLAMA),
    "phi3": CheckpointLayout(_LLAMA | _QKV | _GATE_UP),
    "glm": CheckpointLayout(_LLAMA | _GATE_UP | _QKV_BIAS, interleaved=True),
    "glm4": CheckpointLayout(_LLAMA | _GATE_UP | _QKV_BIAS | _GLM_POST_NORMS, interleaved=True),
    "seed_oss": CheckpointLayout(_LLAMA | _QKV_BIAS),
    "helium": CheckpointLayout(_LLAMA, interleaved=True),
    "ernie4_5": CheckpointLayout(_LLAMA, interleaved=True),
}


# How GGUF's qwen35 differs from the checkpoints of its family: value heads in another order, decays computed.
_QWEN35: dict[str, dict[str, Any]] = {
    "lqkv": {"rows": _channels},
    "lconv": {"rows": _channels},
    "lz": {"rows": lambda h: _value_heads(h, h.lin_v_dim)},
    **{role: {"rows": lambda h: _value_heads(h, 1)} for role in ("lb", "la", "dt_bias")},
    "A_log": {"rows": lambda h: _value_heads(h, 1), "kept_as": Transform(_log_of_minus, _minus_exp)},
    "lout": {"columns": lambda h: _value_heads(h, h.lin_v_dim)},
}


def gguf_layout(architecture: Architecture, layout: CheckpointLayout) -> CheckpointLayout:
    """The tensors of a family, ``layout``, as GGUF has them: its names and orders, norms as they multiply."""
    changes = _QWEN35 if architecture.name == "qwen35" else {}
    parts = {
        role: replace(part, name=architecture.tensors[role], plus_one=False, middle_axis=False, **changes.get(role, {}))
        for role, part in layout.parts.items()
    }
    return CheckpointLayout(parts, architecture.interleaved)
