"""Gemma 2 and 3 (text, and the language model of image-text checkpoints)."""

from __future__ import annotations

from typing import Any

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import ACTIVATIONS, Family, refuse_flags
from krafla_cli.convert.rope_config import FULL, SLIDING, local_theta, rope_fields
from krafla_cli.formats.mlb import LAYER_LOCAL_ROPE, LAYER_WINDOW
from krafla_cli.parts import LAYOUTS

_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def _common(config: ModelConfig, sliding_differ: bool = False) -> dict[str, Any]:
    """What Gemma 2 and 3 share. Every soft cap comes from its own field; null is off."""
    refuse_flags(
        config,
        attention_bias="bias of the attention output",
        use_bidirectional_attention="attention to later positions",
    )
    dim, head_dim = config.integer("hidden_size"), config.integer("head_dim")
    n_heads = config.integer("num_attention_heads")
    return {
        "dim": dim,
        "n_layers": config.n_layers(),
        "n_heads": n_heads,
        "n_kv_heads": config.integer("num_key_value_heads"),
        "hidden_dim": config.integer("intermediate_size"),
        "max_seq": config.integer("max_position_embeddings"),
        "norm_eps": config.norm_eps(),
        "shared_classifier": int(config.tied()),
        "head_dim": 0 if head_dim * n_heads == dim else head_dim,
        "act": config.choice("hidden_activation", ACTIVATIONS),
        "post_norms": 1,
        "embed_scale": dim**0.5,
        "attn_scale": config.checked_positive("query_pre_attn_scalar", config.number("query_pre_attn_scalar")) ** -0.5,
        "attn_softcap": config.optional_number("attn_logit_softcapping") or 0.0,
        "final_softcap": config.optional_number("final_logit_softcapping") or 0.0,
        **rope_fields(config, head_dim, sliding_differ),
    }


def _layer_types(config: ModelConfig, n_layers: int, pattern: int) -> list[bool]:
    """Which layers are local: layer_types, else all but each ``pattern``-th."""
    types = config.layer_list("layer_types", n_layers, (FULL, SLIDING))
    if types is not None:
        return [t == SLIDING for t in types]
    return [(i + 1) % pattern != 0 for i in range(n_layers)]


def _window(config: ModelConfig, local: list[bool]) -> int:
    window = config.optional_integer("sliding_window")
    if window is None and any(local):
        raise config.error("sliding_window", "is null, but there are sliding layers")
    return window or 0


def gemma2_header(config: ModelConfig) -> dict[str, Any]:
    """Gemma 2: windows on alternating layers, one RoPE for all."""
    fields = _common(config)
    local = _layer_types(config, fields["n_layers"], 2)
    flags = bytes(LAYER_WINDOW if w else 0 for w in local)
    return fields | {"sliding_window": _window(config, local), "layer_flags": 1, "flags": flags}


def gemma3_header(config: ModelConfig) -> dict[str, Any]:
    """Gemma 3: q/k norms; local layers have the window and their own RoPE base, which no scaling touches."""
    fields = _common(config, sliding_differ=True)
    if fields["attn_softcap"]:
        raise config.unsupported(
            f"attn_logit_softcapping is {fields['attn_softcap']:g}: Gemma 3 caps no attention scores, and transformers "
            "ignores it; set it to null"
        )
    if config.is_composite and fields["final_softcap"]:
        raise config.unsupported(
            f"final_logit_softcapping is {fields['final_softcap']:g}: transformers ignores it in image-text models, "
            "but not in text models; set it to null"
        )
    pattern = config.integer("sliding_window_pattern")
    local = _layer_types(config, fields["n_layers"], pattern)
    flags = bytes(LAYER_WINDOW | LAYER_LOCAL_ROPE if w else 0 for w in local)
    theta = local_theta(config, 10000.0) if any(local) else 0.0
    return fields | {
        "qk_norm": 1,
        "sliding_window": _window(config, local),
        "rope_local_theta": theta,
        "layer_flags": 1,
        "flags": flags,
    }


GEMMA2 = Family(
    name="gemma2",
    title="Gemma 2",
    model_types=("gemma2",),
    header=gemma2_header,
    layout=LAYOUTS["gemma2"],
    defaults=_DEFAULTS
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA3 = Family(
    name="gemma3",
    title="Gemma 3 (text, and the language model of image-text checkpoints)",
    model_types=("gemma3_text", "gemma3"),
    header=gemma3_header,
    layout=LAYOUTS["gemma3"],
    defaults=_DEFAULTS
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "sliding_window_pattern": 6,
    },
    q4_rule="round",
)
