"""GLM-4 (0414 and before), dense: interleaved RoPE on half of each head, gate and up in one matrix."""

from __future__ import annotations

from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import Family, llama_header
from krafla_cli.parts import LAYOUTS

_DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


def glm_header(config: ModelConfig) -> dict[str, Any]:
    """attention_bias here means q, k and v only."""
    return llama_header(config) | {"qkv_bias": int(config.flag("attention_bias"))}


def glm4_header(config: ModelConfig) -> dict[str, Any]:
    """GLM-4-0414 also normalizes what attention and FFN give."""
    return glm_header(config) | {"post_norms": 1}


GLM = Family(
    name="glm",
    title="GLM-4 (9B chat)",
    model_types=("glm",),
    header=glm_header,
    layout=LAYOUTS["glm"],
    partial_rope=True,
    defaults=_DEFAULTS,
)
GLM4 = Family(
    name="glm4",
    title="GLM-4-0414",
    model_types=("glm4",),
    header=glm4_header,
    layout=LAYOUTS["glm4"],
    partial_rope=True,
    defaults=_DEFAULTS,
)
