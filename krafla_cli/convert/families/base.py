"""What a model family is: data and a few small functions. The conversion itself knows no family by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.rope_config import FULL, SLIDING, rope_fields
from krafla_cli.formats.mlb import ACT_GELU_TANH, ACT_SILU, LAYER_WINDOW
from krafla_cli.parts import CheckpointLayout, Parts


@dataclass(frozen=True)
class Family:
    """One family.

    ``model_types``: the model_type values (of the text part) that belong to it. ``defaults``: what transformers
    assumes for keys that a config leaves out. ``header``: config -> header fields and, under "flags", the layer
    flags; refuses what the format cannot hold. ``layout``: role -> tensor. ``left_out``: patterns of tensors that are
    no part of the language model, left out with a remark. ``partial_rope``: whether its class in transformers
    rotates a part of each head where partial_rotary_factor says so; others ignore that key.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    header: Callable[[ModelConfig], dict[str, Any]]
    layout: CheckpointLayout
    defaults: Mapping[str, Any] = field(default_factory=dict)
    q4_rule: str = "fit"
    left_out: tuple[str, ...] = ()
    partial_rope: bool = False

    @property
    def parts(self) -> Parts:
        """Role -> the checkpoint's tensor."""
        return self.layout.parts

    def leaves_out(self, name: str) -> bool:
        """Whether the tensor ``name`` is known and not needed."""
        return any(re.search(pattern, name) for pattern in self.left_out)


# Buffers that older checkpoints store: computed from the config, never weights.
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$|rotary_emb\.(cos|sin)_cached$")

# Vision towers, projectors and audio parts of image-text checkpoints.
NOT_TEXT = (
    r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.",
)

ACTIVATIONS = {
    "silu": ACT_SILU,
    "swish": ACT_SILU,
    "gelu_pytorch_tanh": ACT_GELU_TANH,
    "gelu_tanh": ACT_GELU_TANH,
    "gelu_new": ACT_GELU_TANH,
    "gelu_fast": ACT_GELU_TANH,
}


def llama_header(config: ModelConfig) -> dict[str, Any]:
    """The fields that nearly every dense family has. hidden_dim is the checkpoint's, not yet padded."""
    dim, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.optional_integer("head_dim") or head_dim_of(config, dim, n_heads)
    return {
        "dim": dim,
        "n_layers": config.n_layers(),
        "n_heads": n_heads,
        "n_kv_heads": config.optional_integer("num_key_value_heads") or n_heads,
        "hidden_dim": config.integer("intermediate_size"),
        "max_seq": config.integer("max_position_embeddings"),
        "norm_eps": config.norm_eps(),
        "shared_classifier": int(config.tied()),
        "head_dim": 0 if head_dim * n_heads == dim else head_dim,
        "act": config.choice("hidden_act", ACTIVATIONS),
        **rope_fields(config, head_dim),
    }


def head_dim_of(config: ModelConfig, dim: int, n_heads: int) -> int:
    """hidden_size / num_attention_heads, which must be whole."""
    if dim % n_heads:
        raise config.error("num_attention_heads", f"is {n_heads}, does not divide hidden_size {dim}")
    return dim // n_heads


def sliding_layers(config: ModelConfig, n_layers: int, window: int | None) -> list[bool] | None:
    """Which layers layer_types puts behind ``window``; None without layer_types. Raises FormatError if it is off."""
    types = config.layer_list("layer_types", n_layers, (FULL, SLIDING))
    if types is None:
        return None
    if window is None and SLIDING in types:
        raise config.error("layer_types", "names sliding layers, but the window is off")
    return [t == SLIDING for t in types]


def window_fields(window: int | None, layers: list[bool] | None = None) -> dict[str, Any]:
    """Header fields for a sliding window on all layers, or on those where ``layers`` is true."""
    if window is None or (layers is not None and not any(layers)):
        return {}
    if layers is None or all(layers):
        return {"sliding_window": window}
    return {"sliding_window": window, "layer_flags": 1, "flags": bytes(LAYER_WINDOW if w else 0 for w in layers)}


def refuse_flags(config: ModelConfig, **reasons: str) -> None:
    """Refuses a config in which one of the keys is true; ``reasons`` say what the format lacks."""
    for key, reason in reasons.items():
        if config.flag(key):
            raise config.unsupported(f"{key} is true: the format holds no {reason}")
