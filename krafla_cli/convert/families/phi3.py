"""Phi-3 and Phi-3.5 with short context: Llama with q, k, v in one matrix and gate, up in another."""

from __future__ import annotations

from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import Family, llama_header, window_fields
from krafla_cli.formats.mlb import ROPE_PLAIN
from krafla_cli.parts import LAYOUTS


def header(config: ModelConfig) -> dict[str, Any]:
    """Header fields; the window, where given, is on every layer. Every RoPE scheme of Phi-3 is longrope."""
    fields = llama_header(config)
    if fields["rope_type"] != ROPE_PLAIN:
        raise config.unsupported(
            "rope_scaling: Phi-3 has longrope only, under whatever name (su, yarn), and longrope is not supported"
        )
    return fields | window_fields(config.optional_integer("sliding_window"))


FAMILY = Family(
    name="phi3",
    title="Phi-3 (4k), Phi-4",
    model_types=("phi3",),
    header=header,
    layout=LAYOUTS["phi3"],
    partial_rope=True,
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
