"""Qwen2 and Qwen2.5 (biases on q, k, v) and Qwen3 (head_dim, q/k norms), dense."""

from __future__ import annotations

from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import Family, llama_header, refuse_flags, sliding_layers, window_fields
from krafla_cli.parts import LAYOUTS

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def sliding_fields(config: ModelConfig) -> dict[str, Any]:
    """The window counts only with use_sliding_window; layer_types says where, else layers from max_window_layers on."""
    n_layers = config.n_layers()
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    layers = sliding_layers(config, n_layers, window)
    if layers is None:
        first = config.integer("max_window_layers", least=0)
        layers = [i >= first for i in range(n_layers)]
    return window_fields(window, layers)


def qwen2_header(config: ModelConfig) -> dict[str, Any]:
    """Qwen2: biases on q, k and v, always."""
    return llama_header(config) | sliding_fields(config) | {"qkv_bias": 1}


def qwen3_header(config: ModelConfig) -> dict[str, Any]:
    """Qwen3: norms on each query and key head."""
    refuse_flags(config, attention_bias="bias of the attention output")
    return llama_header(config) | sliding_fields(config) | {"qk_norm": 1}


QWEN2 = Family(
    name="qwen2",
    title="Qwen2, Qwen2.5",
    model_types=("qwen2",),
    header=qwen2_header,
    layout=LAYOUTS["qwen2"],
    defaults=_DEFAULTS,
)
QWEN3 = Family(
    name="qwen3",
    title="Qwen3 (dense)",
    model_types=("qwen3",),
    header=qwen3_header,
    layout=LAYOUTS["qwen3"],
    defaults=_DEFAULTS | {"head_dim": 128},
)
