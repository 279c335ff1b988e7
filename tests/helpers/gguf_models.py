"""Tiny models as GGUF files, with the names of the gguf package and the conventions of llama.cpp's converter.

Nothing here comes from the code under test: names are the gguf package's, and the rest is what GGUF readers expect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tests.helpers.checkpoints import CHECKPOINTS, Checkpoint

Types = gguf.GGMLQuantizationType
Choose = Callable[[str, npt.NDArray[np.float32]], Types]
_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
_PERMUTED = ("llama", "smollm3")


def _with(name: str, **settings: Any) -> Checkpoint:
    checkpoint = CHECKPOINTS[name]
    return replace(checkpoint, settings=checkpoint.settings | settings)


# What GGUF leaves out and readers assume: the attention scale of Gemma is its head size, every fourth layer of SmolLM3
# has no RoPE, five of six layers of Gemma 3 are local where no pattern is given.
GGUF_CHECKPOINTS: dict[str, Checkpoint] = {
    **{
        name: CHECKPOINTS[name]
        for name in (
            *("llama", "llama-tied", "llama3", "llama-linear", "llama-ffn172", "mistral", "mistral-no-window", "qwen2"),
            *("qwen3", "qwen3-yarn", "phi3", "glm4", "seed_oss"),
        )
    },
    "gemma2": _with("gemma2", query_pre_attn_scalar=16),
    "gemma3": _with("gemma3", query_pre_attn_scalar=16),
    "smollm3": _with("smollm3", no_rope_layer_interval=4, num_hidden_layers=5),
    "ernie4_5": _with("ernie4_5", head_dim=8),
}


def rows_in_pairs(weight: npt.NDArray[Any], n_heads: int) -> npt.NDArray[Any]:
    """Rows of each head from two halves to pairs: what the files of some architectures hold for q and k."""
    halves = weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def all_f32(_name: str, _array: npt.NDArray[np.float32]) -> Types:
    return Types.F32


def matrices_as(kind: Types) -> Choose:
    return lambda _, array: kind if array.ndim == 2 else Types.F32


def gguf_tensors(model: Any) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors of a transformers model as GGUF names and holds them."""
    config, name = model.config, architecture(model)
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    result = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if name in _PERMUTED and ".q_proj." in key:
            values = rows_in_pairs(values, config.num_attention_heads)
        if name in _PERMUTED and ".k_proj." in key:
            values = rows_in_pairs(values, config.num_key_value_heads)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            values = values + np.float32(1)
        result[names.get_name(key, (".weight", ".bias"))] = np.ascontiguousarray(values)
    scaling = config.rope_parameters
    if scaling.get("rope_type") == "llama3":
        result["rope_freqs.weight"] = llama3_divisors(scaling, config.head_dim)
    return result


def llama3_divisors(p: dict[str, Any], dim: int) -> npt.NDArray[np.float32]:
    """What each frequency is divided by, pair by pair, from the definition of the scaling."""
    divisors = []
    for i in range(dim // 2):
        wavelength = 2 * math.pi * p["rope_theta"] ** (2 * i / dim)
        original = p["original_max_position_embeddings"]
        share = (original / wavelength - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
        share = min(max(share, 0.0), 1.0)
        divisors.append(1 / ((1 - share) / p["factor"] + share))
    return np.float32(divisors)


def architecture(model: Any) -> str:
    return _ARCHITECTURES.get(model.config.model_type, model.config.model_type)


def write_metadata(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if name not in ("qwen2", "qwen3", "smollm3") and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma3":
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config.layer_types])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def write_gguf(model: Any, path: Path, choose: Choose = all_f32, extra: Callable[[Any], None] | None = None) -> Path:
    """``model`` (transformers) as a GGUF file; ``choose`` gives each tensor's type, ``extra`` adds metadata."""
    name = architecture(model)
    writer = gguf.GGUFWriter(path, name)
    write_metadata(writer, model.config, name)
    if extra is not None:
        extra(writer)
    for key, values in gguf_tensors(model).items():
        kind = choose(key, values)
        writer.add_tensor(key, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def seeded_model(name: str, seed: int = 0) -> Any:
    from tests.helpers.checkpoints import random_model

    torch.set_num_threads(1)
    return random_model(GGUF_CHECKPOINTS[name], seed)
