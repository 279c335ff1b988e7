"""Mistral and Ministral: Llama with a sliding window on all layers, on some, or off."""

from __future__ import annotations

from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import Family, llama_header, sliding_layers, window_fields
from krafla_cli.parts import LAYOUTS

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}

_DEFAULT_BETA = 0.1  # of Ministral 3, where a config gives no rope_parameters


def mistral_header(config: ModelConfig) -> dict[str, Any]:
    """The window is on every layer, or where layer_types says so; null turns it off.

    Ministral 8B calls itself "mistral" and has layer_types: transformers takes such a config for "ministral".
    """
    fields = llama_header(config)
    window = config.optional_integer("sliding_window")
    return fields | window_fields(window, sliding_layers(config, fields["n_layers"], window))


def ministral3_header(config: ModelConfig) -> dict[str, Any]:
    """Ministral 3 scales queries by position beyond the original context, which the format cannot hold."""
    params = config.section("rope_parameters")
    beta = params.get("llama_4_scaling_beta") if params else _DEFAULT_BETA
    if beta:
        raise config.unsupported(
            f"rope_parameters: llama_4_scaling_beta is {beta}: the format holds no scale of queries by position"
        )
    fields = mistral_header(config)
    if "flags" in fields:
        raise config.error("layer_types", "names full layers, but the window of this family is on all")
    return fields


MISTRAL = Family(
    name="mistral",
    title="Mistral 7B, Nemo, Small (text)",
    model_types=("mistral",),
    header=mistral_header,
    layout=LAYOUTS["mistral"],
    defaults=_DEFAULTS,
)
MINISTRAL = Family(
    name="ministral",
    title="Ministral 8B",
    model_types=("ministral",),
    header=mistral_header,
    layout=LAYOUTS["ministral"],
    defaults=_DEFAULTS,
)
MINISTRAL3 = Family(
    name="ministral3",
    title="Ministral 3 (only without llama_4_scaling_beta)",
    model_types=("ministral3",),
    header=ministral3_header,
    layout=LAYOUTS["ministral3"],
    defaults=_DEFAULTS
    | {
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
)
