"""Tiny models as GGUF files, with the names of the gguf package and the conventions of llama.cpp's converter.

What is written comes from elsewhere than the code under test: names are the gguf package's, and the rest is what GGUF
readers expect.
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

from krafla_cli.formats.mlb_file import open_mlb
from tests.helpers.checkpoints import CHECKPOINTS, Checkpoint

Types = gguf.GGMLQuantizationType
Choose = Callable[[str, npt.NDArray[np.float32]], Types]
_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "qwen3_5_text": "qwen35"}
_PERMUTED = ("llama", "smollm3")


def _with(name: str, **settings: Any) -> Checkpoint:
    checkpoint = CHECKPOINTS[name]
    return replace(checkpoint, settings=checkpoint.settings | settings)


_EVERY_THIRD = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 3,
}

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
    "qwen3_5": _with("qwen3_5", linear_value_head_dim=32, **_EVERY_THIRD),
    "qwen3_5-narrow-heads": _with("qwen3_5", **_EVERY_THIRD),
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
        if name == "qwen35":
            values = qwen35_values(key, values, config)
        key = key.replace(".dt_bias", ".dt_proj.bias")  # as the converters of state-space models call it
        result[names.get_name(key, (".weight", ".bias"))] = np.ascontiguousarray(values)
    scaling = config.rope_parameters
    if scaling.get("rope_type") == "llama3":
        result["rope_freqs.weight"] = llama3_divisors(scaling, config.head_dim)
    return result


def qwen35_values(key: str, values: npt.NDArray[np.float32], config: Any) -> npt.NDArray[np.float32]:
    """Value heads from groups by key head to one of each group in turn; norms, decays and convolutions as used."""
    n_k, n_v = config.linear_num_key_heads, config.linear_num_value_heads
    n_before = 2 * n_k * config.linear_key_head_dim

    def tiled(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return rows.reshape(n_k, n_v // n_k, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        return values + np.float32(1)
    if key.endswith("conv1d.weight"):
        values = values[:, 0]
    if "in_proj_qkv" in key or "conv1d" in key:
        return np.concatenate([values[:n_before], tiled(values[n_before:])])
    if "out_proj" in key:
        return tiled(values.T).T
    if key.endswith("A_log"):
        values = -np.exp(values)
    if any(part in key for part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias")):
        return tiled(values)
    return values


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
    if name == "qwen35":
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
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


def assert_same_model(a: Path, b: Path) -> None:
    """Byte for byte, but for A_log: GGUF has -exp(A_log), whose logarithm may differ in the last place."""
    others = []
    for path in (a, b):
        data, model = bytearray(path.read_bytes()), open_mlb(path)
        for spec in model.tensors.values():
            if spec.role == "A_log":
                data[spec.offset : spec.offset + spec.n_bytes] = bytes(spec.n_bytes)
                np.testing.assert_allclose(model.float32(spec.name), open_mlb(a).float32(spec.name), atol=3e-7)
        others.append(bytes(data))
    assert others[0] == others[1]
