"""Qwen3.5, dense: three of four layers are linear attention (gated delta rule), the others gated attention."""

from __future__ import annotations

from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import Family, llama_header, refuse_flags
from krafla_cli.convert.rope_config import FULL
from krafla_cli.formats.mlb import LAYER_LINEAR
from krafla_cli.parts import LAYOUTS

LINEAR = "linear_attention"


def header(config: ModelConfig) -> dict[str, Any]:
    """Header fields and flags."""
    refuse_flags(config, attention_bias="bias of the attention output")
    fields = llama_header(config)
    n_layers = fields["n_layers"]
    types = config.layer_list("layer_types", n_layers, (FULL, LINEAR))
    if types is None:
        interval = config.integer("full_attention_interval")
        types = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(n_layers)]
    fields |= {"qk_norm": 1, "attn_gate": 1}
    return fields | _linear_fields(config, types) if LINEAR in types else fields


def _linear_fields(config: ModelConfig, types: list[str]) -> dict[str, Any]:
    return {
        "layer_flags": 1,
        "flags": bytes(LAYER_LINEAR if t == LINEAR else 0 for t in types),
        "lin_k_heads": config.integer("linear_num_key_heads"),
        "lin_v_heads": config.integer("linear_num_value_heads"),
        "lin_k_dim": config.integer("linear_key_head_dim"),
        "lin_v_dim": config.integer("linear_value_head_dim"),
        "lin_conv": config.integer("linear_conv_kernel_dim"),
    }


FAMILY = Family(
    name="qwen3_5",
    title="Qwen3.5 (dense; text, and the language model of image-text checkpoints)",
    model_types=("qwen3_5_text", "qwen3_5"),
    header=header,
    layout=LAYOUTS["qwen3_5"],
    partial_rope=True,
    defaults={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
    },
    # Blocks for multi-token prediction; they take no part in ordinary generation.
    left_out=(r"^(model\.)?mtp\.",),
)
