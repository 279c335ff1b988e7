"""Seed-OSS: Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import Family, llama_header, refuse_flags
from krafla_cli.parts import LAYOUTS


def header(config: ModelConfig) -> dict[str, Any]:
    """attention_bias means q, k and v; the output projection has a flag of its own."""
    refuse_flags(config, attention_out_bias="bias of the attention output", mlp_bias="biases of the FFN")
    return llama_header(config) | {"qkv_bias": int(config.flag("attention_bias"))}


FAMILY = Family(
    name="seed_oss",
    title="Seed-OSS",
    model_types=("seed_oss",),
    header=header,
    layout=LAYOUTS["seed_oss"],
    defaults={
        "vocab_size": 155136,
        "hidden_size": 4096,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
)
