"""Phi-3 and Phi-3.5 with short context: Llama with q, k, v in one matrix and gate, up in another."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import LLAMA_PARTS, Family, Part, llama_header, window_fields
from krafla_cli.formats.mlb import Header

_QKV = "layers.{i}.self_attn.qkv_proj.weight"
_GATE_UP = "layers.{i}.mlp.gate_up_proj.weight"


def _qkv_rows(header: Header) -> int:
    return header.q_dim + 2 * header.kv_dim


def _rows(start: int, count: int) -> npt.NDArray[np.intp]:
    return np.arange(start, start + count, dtype=np.intp)


QKV_PARTS = {
    "wq": Part(_QKV, lambda h: _rows(0, h.q_dim), _qkv_rows),
    "wk": Part(_QKV, lambda h: _rows(h.q_dim, h.kv_dim), _qkv_rows),
    "wv": Part(_QKV, lambda h: _rows(h.q_dim + h.kv_dim, h.kv_dim), _qkv_rows),
}
GATE_UP_PARTS = {
    "w1": Part(_GATE_UP, lambda h: _rows(0, h.hidden_dim), lambda h: 2 * h.hidden_dim),
    "w3": Part(_GATE_UP, lambda h: _rows(h.hidden_dim, h.hidden_dim), lambda h: 2 * h.hidden_dim),
}


def header(config: ModelConfig) -> dict[str, Any]:
    """Header fields; the window, where given, is on every layer."""
    return llama_header(config) | window_fields(config.optional_integer("sliding_window"))


FAMILY = Family(
    name="phi3",
    title="Phi-3 (4k), Phi-4",
    model_types=("phi3",),
    header=header,
    parts=LLAMA_PARTS | QKV_PARTS | GATE_UP_PARTS,
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
)
