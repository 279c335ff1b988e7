"""A minimal Llama checkpoint written without transformers, for tests of files and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def tensors(config: dict[str, Any] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors by name."""
    c = config or CONFIG
    rng = np.random.default_rng(seed)
    dim, ffn = c["hidden_size"], c["intermediate_size"]
    kv = dim // c["num_attention_heads"] * c["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], dim), "model.norm.weight": (dim,)}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (dim,),
            p + "self_attn.q_proj.weight": (dim, dim),
            p + "self_attn.k_proj.weight": (kv, dim),
            p + "self_attn.v_proj.weight": (kv, dim),
            p + "self_attn.o_proj.weight": (dim, dim),
            p + "post_attention_layernorm.weight": (dim,),
            p + "mlp.gate_proj.weight": (ffn, dim),
            p + "mlp.up_proj.weight": (ffn, dim),
            p + "mlp.down_proj.weight": (dim, ffn),
        }
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], dim)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, config: dict[str, Any] | None = None, weights: dict[str, np.ndarray] | None = None) -> Path:
    """A checkpoint folder with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config or CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors(config) if weights is None else weights, folder / "model.safetensors")
    return folder
