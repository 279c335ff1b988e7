"""config.json of an exported model: that of its source, kept in the settings, or one that says what the header says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from krafla_cli.errors import FormatError, UnsupportedError
from krafla_cli.export.opened import OpenedModel
from krafla_cli.formats.mlb import (
    ACT_GELU_TANH,
    BLOCK,
    LAYER_LINEAR,
    LAYER_LOCAL_ROPE,
    LAYER_NO_ROPE,
    LAYER_WINDOW,
    ROPE_LINEAR,
    ROPE_LLAMA3,
    ROPE_PLAIN,
    ROPE_YARN,
    Header,
)
from krafla_cli.formats.text import printable
from krafla_cli.parts import LAYOUTS, CheckpointLayout

Raw = dict[str, Any]

# Family -> what transformers calls its text model, and the class of it.
_MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "ministral": ("ministral", "MinistralForCausalLM"),
    "ministral3": ("ministral3", "Ministral3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "glm": ("glm", "GlmForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM"),
    "helium": ("helium", "HeliumForCausalLM"),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM"),
}
# Stated even where there is none: the defaults of some classes lie beyond a small vocabulary.
_SPECIAL_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


@dataclass(frozen=True)
class CheckpointConfig:
    """The config.json of an export, the family's tensors, and the width of its FFN (not padded)."""

    raw: Raw
    family: str
    hidden_dim: int

    @property
    def layout(self) -> CheckpointLayout:
        return LAYOUTS[self.family]


def checkpoint_config(model: OpenedModel) -> CheckpointConfig:
    """From the settings where they have one, else rebuilt from the header.

    Raises FormatError (settings that contradict the header), UnsupportedError naming what no family has.
    """
    family, stored = model.provenance.get("family"), model.provenance.get("config")
    if family in LAYOUTS and isinstance(stored, dict):
        return _restored(model, str(family), stored)
    family = family_of_header(model)
    raw = _rebuilt(model.mlb.header, family)
    return CheckpointConfig(_completed(model, family, raw), family, model.mlb.header.hidden_dim)


def _restored(model: OpenedModel, family: str, stored: Raw) -> CheckpointConfig:
    """The source's config. Of an image-text model only the language model was converted, so only that is left."""
    text = stored.get("text_config")
    raw = dict(text) if isinstance(text, dict) else dict(stored)
    header = model.mlb.header
    hidden = raw.get("intermediate_size")
    if hidden is None:  # the class's own default, which is as the header has it
        hidden = header.hidden_dim
    if not isinstance(hidden, int) or -(-hidden // BLOCK) * BLOCK != header.hidden_dim:
        raise FormatError(
            f"{printable(str(model.path.with_suffix('.json')))}: intermediate_size {printable(str(hidden))} does not "
            f"fit the model's {header.hidden_dim}"
        )
    return CheckpointConfig(_completed(model, family, raw), family, hidden)


def _completed(model: OpenedModel, family: str, raw: Raw) -> Raw:
    """What holds for every export: the class, the vocabulary, whether the classifier is shared, special ids."""
    model_type, class_name = _MODEL_TYPES[family]
    header = model.mlb.header
    for gone in ("quantization_config", "torch_dtype", "auto_map", "_name_or_path", "transformers_version"):
        raw.pop(gone, None)
    ids = {key: model.special_ids.get(name) for key, name in _SPECIAL_IDS.items()}
    return {k: raw.get(k, i) for k, i in ids.items()} | raw | {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": header.vocab,
        "tie_word_embeddings": bool(header.shared_classifier),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# From the header alone


def family_of_header(model: OpenedModel) -> str:
    """The family whose checkpoints hold what the header asks for. Raises UnsupportedError naming what none has."""
    header = model.mlb.header
    found, family = features(header), _likely_family(header)
    too_much, missing = found - _ALLOWED[family], _REQUIRED.get(family, set()) - found
    for names, verb in ((too_much, "has"), (missing, "lacks")):
        if names:
            raise UnsupportedError(
                f"{printable(str(model.path))}: no family of Hugging Face models is like {family} and {verb} "
                f"{', '.join(sorted(names))}"
            )
    return family


def features(header: Header) -> set[str]:
    """What a model has beyond Llama, in words."""
    h = header
    flags = [h.flags_of(i) for i in range(h.n_layers)]
    windows = [bool(h.window_of(i)) for i in range(h.n_layers)]
    found = {
        "biases of q, k, v": h.qkv_bias,
        "q/k norms": h.qk_norm,
        "norms after attention and FFN": h.post_norms,
        "a GELU": h.act == ACT_GELU_TANH,
        "scaled embeddings": h.embed_scale not in (0.0, 1.0),
        "embeddings scaled by another factor than sqrt(dim)": h.embed_scale not in (0.0, 1.0, _rounded(h.dim**0.5)),
        "an attention scale": h.attn_scale not in (0.0, _rounded(h.head_size**-0.5)),
        "a soft cap of scores": h.attn_softcap,
        "a soft cap of logits": h.final_softcap,
        "partial RoPE": h.rot_dim not in (0, h.head_size),
        "an attention gate": h.attn_gate,
        "a window on every layer": all(windows),
        "a window on some layers": any(windows) and not all(windows),
        "layers without RoPE": any(f & LAYER_NO_ROPE for f in flags),
        "layers with a RoPE base of their own": any(f & LAYER_LOCAL_ROPE for f in flags),
        "linear attention": any(f & LAYER_LINEAR for f in flags),
    }
    return {name for name, present in found.items() if present}


def _rounded(value: float) -> float:
    import numpy as np

    return float(np.float32(value))


_GEMMA = {
    "norms after attention and FFN", "a GELU", "scaled embeddings", "an attention scale", "a soft cap of logits",
    "a window on some layers", "a window on every layer",
}  # fmt: skip
_ALLOWED: dict[str, set[str]] = {
    "llama": set(),
    "mistral": {"a window on every layer"},
    "ministral": {"a window on some layers"},
    "qwen2": {"biases of q, k, v", "a window on some layers", "a window on every layer"},
    "qwen3": {"q/k norms", "a window on some layers", "a window on every layer"},
    "gemma2": _GEMMA | {"a soft cap of scores"},
    "gemma3": _GEMMA | {"q/k norms", "layers with a RoPE base of their own"},
    "smollm3": {"layers without RoPE", "a window on some layers"},
    "glm": {"biases of q, k, v", "partial RoPE"},
    "glm4": {"biases of q, k, v", "partial RoPE", "norms after attention and FFN"},
    "qwen3_5": {"q/k norms", "an attention gate", "partial RoPE", "linear attention"},
}


_REQUIRED: dict[str, set[str]] = {
    "gemma2": {"norms after attention and FFN", "scaled embeddings"},
    "gemma3": {"norms after attention and FFN", "scaled embeddings"},
    "qwen3_5": {"q/k norms", "an attention gate"},
}


def _likely_family(header: Header) -> str:
    found = features(header)
    if found & {"linear attention", "an attention gate"}:
        return "qwen3_5"
    if "a GELU" in found:
        return "gemma3" if "q/k norms" in found else "gemma2"
    if "norms after attention and FFN" in found:
        return "glm4"
    if "partial RoPE" in found:
        return "glm"
    if "layers without RoPE" in found:
        return "smollm3"
    if "q/k norms" in found:
        return "qwen3"
    if "biases of q, k, v" in found:
        return "qwen2"
    if "a window on every layer" in found:
        return "mistral"
    return "ministral" if "a window on some layers" in found else "llama"


def _rebuilt(header: Header, family: str) -> Raw:
    h = header
    activation = "gelu_pytorch_tanh" if h.act == ACT_GELU_TANH else "silu"
    raw: Raw = {
        "hidden_size": h.dim,
        "intermediate_size": h.hidden_dim,
        "num_hidden_layers": h.n_layers,
        "num_attention_heads": h.n_heads,
        "num_key_value_heads": h.n_kv_heads,
        "head_dim": h.head_size,
        "max_position_embeddings": h.max_seq,
        "rms_norm_eps": _short(h.norm_eps),
        "hidden_act": activation,
        "hidden_activation": activation,
        "rope_theta": _short(h.rope_theta),
        "rope_scaling": _rope_scaling(h),
    }
    if h.rot_dim or family.startswith("glm"):
        raw["partial_rotary_factor"] = 1.0 if not h.rot_dim else (h.rot_dim + 0.25) / h.head_size
    extra = _EXTRA.get(family)
    return raw | extra(h) if extra is not None else raw


def _short(value: float) -> float:
    """The shortest number that is the same float32."""
    import numpy as np

    return float(str(np.float32(value)))


def _rope_scaling(h: Header) -> Raw | None:
    """The old spelling, which transformers of every version reads."""
    if h.rope_type == ROPE_PLAIN:
        return None
    factor = _short(h.rope_factor)
    if h.rope_type == ROPE_LINEAR:
        return {"rope_type": "linear", "factor": factor}
    low, high = _short(h.rope_low_freq_factor), _short(h.rope_high_freq_factor)
    common = {"factor": factor, "original_max_position_embeddings": h.rope_orig_max_seq}
    if h.rope_type == ROPE_LLAMA3:
        return common | {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high}
    if h.rope_type != ROPE_YARN:
        raise ValueError(f"rope_type {h.rope_type}")
    attention = _short(h.rope_attn_factor)
    return common | {"rope_type": "yarn", "beta_fast": low, "beta_slow": high, "attention_factor": attention}


def _layer_types(h: Header) -> list[str]:
    return ["sliding_attention" if h.window_of(i) else "full_attention" for i in range(h.n_layers)]


def _qwen_window(h: Header) -> Raw:
    used = any(h.window_of(i) for i in range(h.n_layers))
    return {
        "use_sliding_window": used,
        "sliding_window": h.sliding_window or None,
        "layer_types": _layer_types(h),
    }


def _gemma(h: Header) -> Raw:
    scalar = h.score_scale**-2
    if abs(scalar - round(scalar)) > 1e-5 * scalar:
        raise UnsupportedError(f"Gemma's query_pre_attn_scalar is a whole number; this model's would be {scalar:g}")
    return {
        "query_pre_attn_scalar": round(scalar),
        "attn_logit_softcapping": h.attn_softcap or None,
        "final_logit_softcapping": h.final_softcap or None,
        "sliding_window": h.sliding_window or None,
        "layer_types": _layer_types(h),
    }


def _gemma3(h: Header) -> Raw:
    """Gemma 3 has no cap of scores; its local layers have a window and a RoPE base of their own, together."""
    both = LAYER_WINDOW | LAYER_LOCAL_ROPE
    if any(h.flags_of(i) & both not in (0, both) for i in range(h.n_layers)):
        raise UnsupportedError("Gemma 3 has window and local RoPE base on the same layers; this model has not")
    return _gemma(h) | {"rope_local_base_freq": _short(h.rope_local_theta or 10000.0)}


def _smollm3(h: Header) -> Raw:
    return _qwen_window(h) | {"no_rope_layers": [int(not h.flags_of(i) & LAYER_NO_ROPE) for i in range(h.n_layers)]}


def _qwen3_5(h: Header) -> Raw:
    return {
        "layer_types": ["linear_attention" if h.is_linear(i) else "full_attention" for i in range(h.n_layers)],
        "linear_num_key_heads": h.lin_k_heads,
        "linear_num_value_heads": h.lin_v_heads,
        "linear_key_head_dim": h.lin_k_dim,
        "linear_value_head_dim": h.lin_v_dim,
        "linear_conv_kernel_dim": h.lin_conv,
    }


_EXTRA: dict[str, Callable[[Header], Raw]] = {
    "mistral": lambda h: {"sliding_window": h.sliding_window},
    "ministral": lambda h: {"sliding_window": h.sliding_window, "layer_types": _layer_types(h)},
    "qwen2": _qwen_window,
    "qwen3": _qwen_window,
    "gemma2": _gemma,
    "gemma3": _gemma3,
    "smollm3": _smollm3,
    "glm": lambda h: {"attention_bias": bool(h.qkv_bias)},
    "glm4": lambda h: {"attention_bias": bool(h.qkv_bias)},
    "qwen3_5": _qwen3_5,
}
