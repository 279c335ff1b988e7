"""Which GGUF architecture can hold a model, and the metadata that says what its header says.

An architecture is what llama.cpp makes of it: what it does not read, a model must not need. Sources: the GGUF
specification; llama.cpp's readers of the architectures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from krafla_cli.errors import UnsupportedError
from krafla_cli.formats.gguf_names import ARCHITECTURES, ATTN_FACTOR_KEY, LLAMA3_KEY, Architecture
from krafla_cli.formats.mlb import (
    ACT_GELU_TANH,
    LAYER_LINEAR,
    LAYER_LOCAL_ROPE,
    LAYER_NO_ROPE,
    LAYER_WINDOW,
    ROPE_LINEAR,
    ROPE_LLAMA3,
    ROPE_YARN,
    Header,
)

Metadata = dict[str, Any]
_YARN_BETAS = (32.0, 1.0)  # what llama.cpp computes with where an architecture reads no others


@dataclass(frozen=True)
class _Rules:
    """What llama.cpp does for an architecture. ``bias`` None: with or without.

    ``window_pattern``: all but each n-th layer are local where the file does not say; 0: no window is read.
    ``scaled_layers``: the number of layers at which the attention scale is taken from dim / heads. ``hybrid``: gated
    attention in every n-th layer, linear attention in the others.
    """

    bias: bool | None = False
    qk_norm: bool = False
    gemma: bool = False
    post_norms: bool = False
    window_pattern: int = 0
    scaled_layers: int = 0
    local_rope: bool = False
    cap_of_scores: bool = False
    no_rope_step: int = 0
    partial_rope: bool = False
    hybrid: bool = False
    llama3: bool = False


_RULES = {
    "llama": _Rules(llama3=True),
    "qwen2": _Rules(bias=True),
    "qwen3": _Rules(qk_norm=True),
    "qwen35": _Rules(qk_norm=True, partial_rope=True, hybrid=True),
    "smollm3": _Rules(no_rope_step=4),
    "gemma2": _Rules(gemma=True, post_norms=True, window_pattern=2, scaled_layers=46, cap_of_scores=True),
    "gemma3": _Rules(
        gemma=True, post_norms=True, qk_norm=True, window_pattern=6, scaled_layers=62, local_rope=True
    ),
    "glm4": _Rules(bias=None, post_norms=True, partial_rope=True),
    "seed_oss": _Rules(bias=True),
}  # fmt: skip


def architecture_for(header: Header, path: str) -> Architecture:
    """The architecture that holds the model. Raises UnsupportedError that names what the nearest one lacks."""
    reasons = {name: list(_misfits(header, name, rules)) for name, rules in _RULES.items()}
    nearest = min(reasons, key=lambda name: len(reasons[name]))
    if reasons[nearest]:
        raise UnsupportedError(
            f"{path}: GGUF has no architecture for this model; the nearest is {nearest}, but the model has "
            f"{'; '.join(reasons[nearest])}"
        )
    return ARCHITECTURES[nearest]


def _misfits(h: Header, name: str, rules: _Rules) -> Iterator[str]:
    """What ``h`` needs and the architecture has not, or the other way round."""
    if rules.bias is not None and bool(h.qkv_bias) != rules.bias:
        yield "biases of q, k, v" if h.qkv_bias else "no biases of q, k, v"
    if bool(h.qk_norm) != rules.qk_norm:
        yield "q/k norms" if h.qk_norm else "no q/k norms"
    if bool(h.post_norms) != rules.post_norms:
        yield "norms after attention and FFN" if h.post_norms else "no norms after attention and FFN"
    if (h.act == ACT_GELU_TANH) != rules.gemma:
        yield "a GELU" if h.act == ACT_GELU_TANH else "no GELU"
    if not _close(h.embed_scale or 1.0, h.dim**0.5 if rules.gemma else 1.0):
        yield f"a factor of {h.embed_scale or 1.0:g} on embeddings"
    if not _close(h.score_scale, _score_scale(h, rules)):
        yield f"an attention scale of {h.score_scale:g}"
    if bool(h.attn_softcap) != rules.cap_of_scores:
        yield "a soft cap of scores" if h.attn_softcap else "no soft cap of scores"
    if h.final_softcap and not rules.gemma:
        yield "a soft cap of logits"
    if rules.cap_of_scores and not h.final_softcap:
        yield "no soft cap of logits"
    if h.rot_dim not in (0, h.head_size) and not rules.partial_rope:
        yield f"RoPE on {h.rot_dim} of {h.head_size} dimensions"
    if bool(h.attn_gate) != rules.hybrid:
        yield "an attention gate" if h.attn_gate else "no attention gate"
    if name == "qwen2" and h.q_dim != h.dim:
        yield f"heads of another size ({h.head_size}) than dim / heads"
    if not ARCHITECTURES[name].own_classifier and not h.shared_classifier:
        yield "a classifier of its own"
    yield from _layer_misfits(h, rules)
    yield from _scaling_misfits(h, rules)


def full_attention_interval(h: Header) -> int:
    """n where every n-th layer, and no other, has full attention; 0 where there is no such n."""
    linear = [h.is_linear(i) for i in range(h.n_layers)]
    if all(linear):
        return 0
    n = linear.index(False) + 1
    return n if linear == [(i + 1) % n != 0 for i in range(h.n_layers)] else 0


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def _score_scale(h: Header, rules: _Rules) -> float:
    by_width = rules.scaled_layers == h.n_layers
    return float((h.dim // h.n_heads if by_width else h.head_size) ** -0.5)


def _layer_misfits(h: Header, rules: _Rules) -> Iterator[str]:
    flags = [h.flags_of(i) for i in range(h.n_layers)]
    if any(f & LAYER_LINEAR for f in flags) and not rules.hybrid:
        yield "linear attention"
    if rules.hybrid and not full_attention_interval(h):
        yield "layers of full attention that are not every n-th one"
    no_rope = [bool(f & LAYER_NO_ROPE) for f in flags]
    expected = [rules.no_rope_step != 0 and (i + 1) % rules.no_rope_step == 0 for i in range(h.n_layers)]
    if no_rope != expected:
        layers = [i for i, (a, b) in enumerate(zip(no_rope, expected, strict=True)) if a != b]
        yield f"RoPE {'left out' if no_rope[layers[0]] else 'applied'} in layer {layers[0]}"
    windows = [h.window_of(i) for i in range(h.n_layers)]
    if any(0 < w < h.max_seq for w in windows) and not rules.window_pattern:
        yield f"a window of {h.sliding_window} positions"
    local = [bool(f & LAYER_LOCAL_ROPE) for f in flags]
    wanted = [rules.local_rope and bool(w) for w in windows]
    if local != wanted:
        yield "a RoPE base of their own on other layers than those with a window"


def _scaling_misfits(h: Header, rules: _Rules) -> Iterator[str]:
    if h.rope_type == ROPE_LLAMA3 and not rules.llama3:
        yield "RoPE scaling llama3"
    if h.rope_type == ROPE_YARN and (h.rope_low_freq_factor, h.rope_high_freq_factor) != _YARN_BETAS:
        yield f"yarn with beta_fast {h.rope_low_freq_factor:g} and beta_slow {h.rope_high_freq_factor:g}"


def metadata(h: Header, architecture: Architecture) -> Metadata:
    """The header as metadata: key -> whole number, float, text, truth value, or array."""
    name = architecture.name
    found: Metadata = {
        "context_length": h.max_seq,
        "embedding_length": h.dim,
        "block_count": h.n_layers,
        "feed_forward_length": h.hidden_dim,
        "attention.head_count": h.n_heads,
        "attention.head_count_kv": h.n_kv_heads,
        "attention.key_length": h.head_size,
        "attention.value_length": h.head_size,
        "attention.layer_norm_rms_epsilon": h.norm_eps,
        "rope.freq_base": h.rope_theta,
        "rope.dimension_count": h.rot_size,
        "vocab_size": h.vocab,
        **_windows(h, _RULES[name]),
        **(_linear_attention(h) if _RULES[name].hybrid else {}),
        **_scaling(h),
    }
    if h.attn_softcap:
        found["attn_logit_softcapping"] = h.attn_softcap
    if h.final_softcap:
        found["final_logit_softcapping"] = h.final_softcap
    return {f"{name}.{key}": value for key, value in found.items()} | _notes(h)


def _windows(h: Header, rules: _Rules) -> Metadata:
    local = [bool(h.flags_of(i) & LAYER_WINDOW) for i in range(h.n_layers)]
    if not h.sliding_window or not any(local):
        return {}
    found: Metadata = {"attention.sliding_window": h.sliding_window}
    n = rules.window_pattern
    if n and local != [i % n < n - 1 for i in range(h.n_layers)]:
        found["attention.sliding_window_pattern"] = local
    if rules.local_rope:
        found["rope.freq_base_swa"] = h.rope_local_theta
    return found


def _linear_attention(h: Header) -> Metadata:
    """Sizes by the names of state-space models; sections of positions, which are all the same for text."""
    n_pairs = h.rot_size // 2
    return {
        "full_attention_interval": full_attention_interval(h),
        "ssm.conv_kernel": h.lin_conv,
        "ssm.state_size": h.lin_k_dim,
        "ssm.group_count": h.lin_k_heads,
        "ssm.time_step_rank": h.lin_v_heads,
        "ssm.inner_size": h.lin_v_heads * h.lin_v_dim,
        "rope.dimension_sections": np.array([-(-(n_pairs - i) // 3) for i in range(3)] + [0], np.int32),
    }


def _scaling(h: Header) -> Metadata:
    if h.rope_type == ROPE_LINEAR:
        return {"rope.scaling.type": "linear", "rope.scaling.factor": h.rope_factor}
    if h.rope_type != ROPE_YARN:
        return {}
    usual = yarn_attention_factor(h.rope_factor)
    found: Metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": h.rope_factor,
        "rope.scaling.original_context_length": h.rope_orig_max_seq,
    }
    if not _close(h.rope_attn_factor, usual):
        found["rope.scaling.attn_factor"] = h.rope_attn_factor / usual
    return found


def yarn_attention_factor(factor: float) -> float:
    """The factor on cos and sin that YaRN has where none is given."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _notes(h: Header) -> Metadata:
    """What GGUF keeps in a computed form only, as it was: reading believes it where it gives just that form."""
    if h.rope_type == ROPE_LLAMA3:
        values = [h.rope_factor, h.rope_low_freq_factor, h.rope_high_freq_factor, float(h.rope_orig_max_seq)]
        return {LLAMA3_KEY: np.array(values, np.float32)}
    if h.rope_type == ROPE_YARN:
        return {ATTN_FACTOR_KEY: h.rope_attn_factor}
    return {}
