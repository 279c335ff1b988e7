"""What a model family is: data and a few small functions. The conversion itself knows no family by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.rope_config import rope_fields
from krafla_cli.formats.mlb import ACT_GELU_TANH, ACT_SILU, LAYER_WINDOW, Header

RowOrder = Callable[[Header], npt.NDArray[np.intp]]


@dataclass(frozen=True)
class Part:
    """Where one tensor of the .mlb comes from.

    ``name``: the checkpoint's name without the model's prefix, "{i}" for the layer. ``rows``: which of the
    checkpoint's rows, in the checkpoint's own (rotate-half) order; all where None. ``source_rows``: how many rows
    the checkpoint's tensor has then. Both are given the header with hidden_dim as the checkpoint has it.
    ``plus_one``: the checkpoint stores w and multiplies by (1 + w). ``middle_axis``: the checkpoint has an axis of
    size 1 between rows and columns (convolutions).
    """

    name: str
    rows: RowOrder | None = None
    source_rows: Callable[[Header], int] | None = None
    plus_one: bool = False
    middle_axis: bool = False


@dataclass(frozen=True)
class Family:
    """One family.

    ``model_types``: the model_type values (of the text part) that belong to it. ``defaults``: what transformers
    assumes for keys that a config leaves out. ``header``: config -> header fields and, under "flags", the layer
    flags; refuses what the format cannot hold. ``parts``: role -> source. ``left_out``: patterns of tensors that are
    no part of the language model, left out with a remark.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    header: Callable[[ModelConfig], dict[str, Any]]
    parts: Mapping[str, Part]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    q4_rule: str = "fit"
    interleaved: bool = False
    left_out: tuple[str, ...] = ()

    def leaves_out(self, name: str) -> bool:
        """Whether the tensor ``name`` is known and not needed."""
        return any(re.search(pattern, name) for pattern in self.left_out)


# Buffers that older checkpoints store: computed from the config, never weights.
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$|rotary_emb\.(cos|sin)_cached$")

# Vision towers, projectors and audio parts of image-text checkpoints.
NOT_TEXT = (
    r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.",
)

LLAMA_PARTS: dict[str, Part] = {
    "tok_emb": Part("embed_tokens.weight"),
    "attn_norm": Part("layers.{i}.input_layernorm.weight"),
    "wq": Part("layers.{i}.self_attn.q_proj.weight"),
    "wk": Part("layers.{i}.self_attn.k_proj.weight"),
    "wv": Part("layers.{i}.self_attn.v_proj.weight"),
    "wo": Part("layers.{i}.self_attn.o_proj.weight"),
    "ffn_norm": Part("layers.{i}.post_attention_layernorm.weight"),
    "w1": Part("layers.{i}.mlp.gate_proj.weight"),
    "w2": Part("layers.{i}.mlp.down_proj.weight"),
    "w3": Part("layers.{i}.mlp.up_proj.weight"),
    "final_norm": Part("norm.weight"),
    "wcls": Part("lm_head.weight"),
}
QKV_BIAS_PARTS: dict[str, Part] = {
    "bq": Part("layers.{i}.self_attn.q_proj.bias"),
    "bk": Part("layers.{i}.self_attn.k_proj.bias"),
    "bv": Part("layers.{i}.self_attn.v_proj.bias"),
}
QK_NORM_PARTS: dict[str, Part] = {
    "q_norm": Part("layers.{i}.self_attn.q_norm.weight"),
    "k_norm": Part("layers.{i}.self_attn.k_norm.weight"),
}

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
        "norm_eps": config.number("rms_norm_eps"),
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
