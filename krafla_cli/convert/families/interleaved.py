"""Helium and ERNIE 4.5 (dense): Llama whose checkpoints have RoPE pairs interleaved already."""

from __future__ import annotations

from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import Family, llama_header, refuse_flags
from krafla_cli.parts import LAYOUTS


def helium_header(config: ModelConfig) -> dict[str, Any]:
    """Header fields."""
    refuse_flags(config, attention_bias="biases of this family", mlp_bias="biases of the FFN")
    return llama_header(config)


def ernie_header(config: ModelConfig) -> dict[str, Any]:
    """Header fields; use_bias puts biases everywhere, which the format cannot hold."""
    refuse_flags(config, use_bias="biases of attention output and FFN")
    return llama_header(config)


HELIUM = Family(
    name="helium",
    title="Helium",
    model_types=("helium",),
    header=helium_header,
    layout=LAYOUTS["helium"],
    defaults={
        "vocab_size": 48000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
        "tie_word_embeddings": False,
    },
)
ERNIE = Family(
    name="ernie4_5",
    title="ERNIE 4.5 (dense)",
    model_types=("ernie4_5",),
    header=ernie_header,
    layout=LAYOUTS["ernie4_5"],
    defaults={
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
)
