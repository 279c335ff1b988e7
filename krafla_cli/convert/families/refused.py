"""Model types that are known and cannot be held, with the reason; everything else unknown is refused by name alone."""

from __future__ import annotations

from collections.abc import Mapping

_EXPERTS = "it is a mixture of experts, which the format cannot hold"
_POST_NORM_ONLY = "its blocks have no norm before attention and FFN, and its q/k norms span all heads or follow them"
_LAYER_NORM = "it uses LayerNorm with a mean or a bias; the format has RMSNorm only"

REFUSED: Mapping[str, str] = {
    "arcee": "its FFN has no gate (relu2)",
    "apertus": "its FFN has no gate (xielu)",
    "nanochat": "its FFN has no gate (relu2)",
    "nemotron": "its FFN has no gate (relu2)",
    "olmo": _LAYER_NORM,
    "olmo2": _POST_NORM_ONLY,
    "olmo3": _POST_NORM_ONLY,
    "exaone4": _POST_NORM_ONLY,
    "cohere": _LAYER_NORM,
    "cohere2": _LAYER_NORM,
    "stablelm": _LAYER_NORM,
    "starcoder2": _LAYER_NORM,
    "gpt2": _LAYER_NORM,
    "gpt_neox": _LAYER_NORM,
    "phi": _LAYER_NORM,
    "falcon": _LAYER_NORM,
    "bloom": _LAYER_NORM,
    "mpt": _LAYER_NORM,
    "gptj": _LAYER_NORM,
    "opt": _LAYER_NORM,
    "gemma": "its configs disagree about the kind of GELU; Gemma 2 and 3 are supported",
    "gemma3n": "its per-layer embeddings and AltUp streams have no place in the format",
    "gemma3n_text": "its per-layer embeddings and AltUp streams have no place in the format",
    "granite": "its residual and logit multipliers have no place in the format",
    "hunyuan_v1_dense": "its q/k norms follow RoPE",
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": _EXPERTS,
    "qwen3_5_moe": _EXPERTS,
    "qwen3_5_moe_text": _EXPERTS,
    "gpt_oss": _EXPERTS,
    "olmoe": _EXPERTS,
    "deepseek_v2": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "llama4": _EXPERTS,
    "llama4_text": _EXPERTS,
    "granitemoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "mamba": "it has no attention, and its state-space layers have no place in the format",
    "mamba2": "it has no attention, and its state-space layers have no place in the format",
    "clip": "it is a vision model",
    "siglip": "it is a vision model",
    "vit": "it is a vision model",
    "paligemma": "in its prompts every position attends to all others",
    "bert": "it is an encoder, and not the architecture of LEMB embedding models either",
    "roberta": "it is an encoder, and not the architecture of LEMB embedding models either",
    "t5": "it is an encoder-decoder",
    "whisper": "it is a speech model",
}
