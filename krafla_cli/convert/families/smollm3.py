"""SmolLM3: Llama with some layers whose queries and keys are not rotated."""

from __future__ import annotations

from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import Family, llama_header, refuse_flags, sliding_layers
from krafla_cli.formats.mlb import LAYER_NO_ROPE, LAYER_WINDOW
from krafla_cli.parts import LAYOUTS


def _has_rope(config: ModelConfig, n_layers: int) -> list[bool]:
    """no_rope_layers, despite its name, holds 1 where RoPE is on; without it each n-th layer has none."""
    entries = config.layer_list("no_rope_layers", n_layers, (0, 1))
    if entries is not None:
        return [bool(e) for e in entries]
    interval = config.integer("no_rope_layer_interval")
    return [(i + 1) % interval != 0 for i in range(n_layers)]


def _has_window(config: ModelConfig, has_rope: list[bool], window: int | None) -> list[bool]:
    """Without layer_types the window is on the layers without RoPE."""
    layers = sliding_layers(config, len(has_rope), window)
    return [window is not None and not r for r in has_rope] if layers is None else layers


def header(config: ModelConfig) -> dict[str, Any]:
    """Header fields and flags. The window counts only with use_sliding_window."""
    refuse_flags(config, attention_bias="bias of the attention output", mlp_bias="biases of the FFN")
    fields = llama_header(config)
    has_rope = _has_rope(config, fields["n_layers"])
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    has_window = _has_window(config, has_rope, window)
    flags = bytes(
        (0 if r else LAYER_NO_ROPE) | (LAYER_WINDOW if w else 0) for r, w in zip(has_rope, has_window, strict=True)
    )
    if not any(flags):
        return fields
    return fields | {"sliding_window": window if any(has_window) else 0, "layer_flags": 1, "flags": flags}


FAMILY = Family(
    name="smollm3",
    title="SmolLM3",
    model_types=("smollm3",),
    header=header,
    layout=LAYOUTS["smollm3"],
    defaults={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2000000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
)
