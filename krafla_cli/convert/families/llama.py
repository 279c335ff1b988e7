"""Llama 2, 3, 3.1 and 3.2, and what is Llama in structure (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import Family, llama_header, refuse_flags
from krafla_cli.parts import LAYOUTS


def header(config: ModelConfig) -> dict[str, Any]:
    """Header fields; attention_bias also puts a bias on the output projection, which the format cannot hold."""
    refuse_flags(config, attention_bias="bias of the attention output", mlp_bias="biases of the FFN")
    return llama_header(config)


FAMILY = Family(
    name="llama",
    title="Llama 2, 3, 3.1, 3.2; SmolLM2, TinyLlama and others of its structure",
    model_types=("llama",),
    header=header,
    layout=LAYOUTS["llama"],
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
)
