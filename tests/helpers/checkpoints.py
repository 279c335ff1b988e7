"""Tiny random checkpoints as transformers saves them, for every family that ``mlb convert`` knows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from krafla_cli.convert.pipeline import Result
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.quant.matrix import dequantize

VOCAB = 101
MAX_SEQ = 512

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_SEQ,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_SLIDING3 = ["sliding_attention", "full_attention", "sliding_attention"]
_QWEN35 = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}


@dataclass(frozen=True)
class Checkpoint:
    """A transformers config class with settings on top of the common small ones; ``unset``: those it does not know."""

    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    def make_config(self) -> Any:
        settings = {k: v for k, v in {**_BASE, **self.settings}.items() if k not in self.unset}
        return getattr(transformers, self.config)(**settings, attn_implementation="eager")


CHECKPOINTS: dict[str, Checkpoint] = {
    "llama": Checkpoint("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": Checkpoint("LlamaConfig", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama3": Checkpoint("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-linear": Checkpoint(
        "LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}
    ),
    "llama-ffn172": Checkpoint("LlamaConfig", {"intermediate_size": 172}),
    "mistral": Checkpoint("MistralConfig", {"sliding_window": 9}),
    "mistral-no-window": Checkpoint("MistralConfig", {"sliding_window": None}),
    "ministral": Checkpoint("MinistralConfig", {"sliding_window": 9, "layer_types": _SLIDING3}),
    "ministral3": Checkpoint(
        "Ministral3Config",
        {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.0}},
    ),
    "qwen2": Checkpoint("Qwen2Config", unset=("head_dim",)),
    "qwen2-window": Checkpoint(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, unset=("head_dim",)
    ),
    "qwen3": Checkpoint("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3-yarn": Checkpoint("Qwen3Config", {"rope_parameters": _YARN}),
    "qwen3-yarn-factor": Checkpoint(
        "Qwen3Config", {"rope_parameters": _YARN | {"attention_factor": 1.3, "beta_fast": 16}}
    ),
    "gemma2": Checkpoint(
        "Gemma2Config",
        {
            "query_pre_attn_scalar": 11,
            "sliding_window": 9,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Checkpoint(
        "Gemma3TextConfig",
        {
            "query_pre_attn_scalar": 24,
            "sliding_window": 9,
            "layer_types": _SLIDING3,
            "rope_parameters": _GEMMA3_ROPE,
        },
    ),
    "smollm3": Checkpoint("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "smollm3-window": Checkpoint(
        "SmolLM3Config", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 9}
    ),
    "qwen3_5": Checkpoint("Qwen3_5TextConfig", _QWEN35),
    "phi3": Checkpoint("Phi3Config", {"sliding_window": 9}, unset=("head_dim",)),
    "glm": Checkpoint("GlmConfig", {"attention_bias": True}),
    "glm4": Checkpoint("Glm4Config", {"attention_bias": False}),
    "seed_oss": Checkpoint("SeedOssConfig"),
    "helium": Checkpoint("HeliumConfig", {"head_dim": 8}),
    "ernie4_5": Checkpoint("Ernie4_5Config"),
}


def random_model(checkpoint: Checkpoint, seed: int) -> Any:
    """A float32 transformers model with random weights, norms and biases included."""
    model = transformers.AutoModelForCausalLM.from_config(checkpoint.make_config(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter, generator))
    return model.eval()


def _random(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(parameter.shape, generator=generator)
    if "norm" in name:
        return 0.7 + 0.3 * normal
    if "embed_tokens" in name:
        return normal
    return 1.5 * normal / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else normal


def save(model: Any, folder: Path) -> Path:
    """``model`` as transformers saves it: config.json, generation_config.json, model.safetensors."""
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Changes keys of config.json; the value ``...`` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def load_dequantized(model: Any, result: Result) -> None:
    """Gives ``model`` the weights that the converted file holds: the inverse of what the plan says was done."""
    mlb = open_mlb(result.output)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    for plan in result.plan.tensors:
        spec = plan.spec
        if spec.is_quantized:
            quantized = mlb.quantized(spec.name)
            values = dequantize(quantized.q, quantized.d, spec.encoding, *spec.shape)
        else:
            values = mlb.float32(spec.name)
        target = state[plan.source]
        flat = target.reshape(len(target), -1)
        rows = np.arange(len(flat)) if plan.rows is None else plan.rows
        values = values.reshape(len(values), -1)[: len(rows), : flat.shape[1]] - np.float32(plan.plus_one)
        flat[torch.from_numpy(rows)] = torch.from_numpy(values.copy())
    model.load_state_dict(state, strict=False)
