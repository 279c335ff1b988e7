"""transformers models with random weights, and the .mlb files that hold exactly the same weights.

A mapping of its own from transformers' tensors to the format's, so that the engines are tested without the converter.
Each twin's header is written out by hand from the specification; nothing of ``krafla_cli.convert`` is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from krafla_cli.formats.mlb import (
    LAYER_LINEAR,
    LAYER_LOCAL_ROPE,
    LAYER_NO_ROPE,
    LAYER_WINDOW,
    Header,
    TensorSpec,
    tensors,
)
from krafla_cli.rope import interleaved_order
from tests.helpers.models import TINY, write_model

_LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "wg": "self_attn.q_proj",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
    "lqkv": "linear_attn.in_proj_qkv",
    "lz": "linear_attn.in_proj_z",
    "lb": "linear_attn.in_proj_b",
    "la": "linear_attn.in_proj_a",
    "lconv": "linear_attn.conv1d",
    "dt_bias": "linear_attn.dt_bias",
    "A_log": "linear_attn.A_log",
    "lnorm": "linear_attn.norm",
    "lout": "linear_attn.out_proj",
}
_GEMMA_NAMES = _LLAMA_NAMES | {
    "post_attn_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
_PERMUTED = {"wq", "wk", "bq", "bk", "q_norm", "k_norm"}
_WITHOUT_SUFFIX = ("dt_bias", "A_log", ".bias")


@dataclass(frozen=True)
class Family:
    """A transformers configuration and the header that it stands for.

    ``names``: role to the end of the parameter's name; ``norm_offset``: 1 where norms multiply by 1 + w.
    """

    config: str
    settings: dict[str, Any]
    header: Header
    names: dict[str, str] = field(default_factory=lambda: _LLAMA_NAMES)
    norm_offset: float = 0.0


def _family(config: str, settings: dict[str, Any], **header: Any) -> Family:
    return Family(config, settings, replace(TINY, **header))


_QWEN35 = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA = {"act": 1, "post_norms": 1, "embed_scale": 8.0, "shared_classifier": 1, "sliding_window": 9}

FAMILIES: dict[str, Family] = {
    "llama": _family("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": _family("LlamaConfig", {"tie_word_embeddings": True}, shared_classifier=1),
    "llama3": _family(
        "LlamaConfig",
        {"rope_parameters": {**_LLAMA3, "rope_theta": 10000.0}},
        rope_type=1,
        rope_factor=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_orig_max_seq=64,
    ),
    "llama-linear": _family(
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
        rope_type=2,
        rope_factor=3.0,
        rope_theta=500.0,
    ),
    "qwen2": _family("Qwen2Config", {"head_dim": 16}, qkv_bias=1),
    "qwen3": _family("Qwen3Config", {"tie_word_embeddings": True}, qk_norm=1, shared_classifier=1),
    "qwen3-yarn": _family(
        "Qwen3Config",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            }
        },
        qk_norm=1,
        rope_type=3,
        rope_factor=4.0,
        rope_low_freq_factor=32.0,
        rope_high_freq_factor=1.0,
        rope_orig_max_seq=64,
        rope_attn_factor=0.1 * float(np.log(4.0)) + 1,
    ),
    "mistral": _family("MistralConfig", {"sliding_window": 9}, sliding_window=9),
    "smollm3": _family(
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        rope_theta=2000000.0,  # the default of transformers for this family
        layer_flags=1,
        flags=bytes([0, LAYER_NO_ROPE, 0]),
        shared_classifier=1,
    ),
    "gemma2": replace(
        _family(
            "Gemma2Config",
            {
                "query_pre_attn_scalar": 11,
                "sliding_window": 9,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 3.0,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            **_GEMMA,
            attn_scale=11**-0.5,
            attn_softcap=5.0,
            final_softcap=3.0,
            layer_flags=1,
            flags=bytes([LAYER_WINDOW, 0, LAYER_WINDOW]),
        ),
        names=_GEMMA_NAMES,
        norm_offset=1.0,
    ),
    "gemma3": replace(
        _family(
            "Gemma3TextConfig",
            {
                "query_pre_attn_scalar": 24,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                },
            },
            **_GEMMA,
            attn_scale=24**-0.5,
            qk_norm=1,
            layer_flags=1,
            flags=bytes([LAYER_WINDOW | LAYER_LOCAL_ROPE, 0, LAYER_WINDOW | LAYER_LOCAL_ROPE]),
            rope_theta=100000.0,
            rope_local_theta=1000.0,
            rope_type=2,
            rope_factor=8.0,
        ),
        names=_GEMMA_NAMES,
        norm_offset=1.0,
    ),
    "qwen3_5": replace(
        _family(
            "Qwen3_5TextConfig",
            {**_QWEN35, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
            layer_flags=1,
            flags=bytes([LAYER_LINEAR, LAYER_LINEAR, 0]),
            qk_norm=1,
            attn_gate=1,
            rot_dim=4,
            lin_k_heads=2,
            lin_v_heads=4,
            lin_k_dim=8,
            lin_v_dim=16,
            lin_conv=4,
        ),
        norm_offset=1.0,
    ),
}


def transformers_model(family: Family, seed: int) -> Any:
    """A transformers model of ``family`` in float32 with random weights, random norms and biases included."""
    h = family.header
    settings = {
        "vocab_size": h.vocab,
        "hidden_size": h.dim,
        "intermediate_size": h.hidden_dim,
        "num_hidden_layers": h.n_layers,
        "num_attention_heads": h.n_heads,
        "num_key_value_heads": h.n_kv_heads,
        "head_dim": h.head_dim,
        "max_position_embeddings": h.max_seq,
        "rms_norm_eps": h.norm_eps,
        "tie_word_embeddings": bool(h.shared_classifier),
        "attn_implementation": "eager",
    }
    config = getattr(transformers, family.config)(**{**settings, **family.settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter, family.norm_offset, generator))
    return model.eval()


def _random(name: str, parameter: torch.Tensor, norm_offset: float, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(parameter.shape, generator=generator)
    if "norm" in name:
        return (0.0 if norm_offset and "linear_attn" not in name else 1.0) + 0.3 * normal
    if "embed_tokens" in name:
        return normal
    return 1.5 * normal / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else normal


def write_twin(path: Path, family: Family, model: Any, wtype: int, scale_f16: int = 1, q8_mask: int = 0) -> None:
    """Writes ``model`` as a .mlb and gives ``model`` the weights that the file holds, dequantized."""
    header = replace(family.header, wtype=wtype, scale_f16=scale_f16, q8_mask=q8_mask)
    places = {s.name: _Place.of(s, header, family, model) for s in tensors(header) if s.encoding != "u8"}
    stored = write_model(path, header, {name: place.read() for name, place in places.items()})
    for name, values in stored.items():
        places[name].write(values)


@dataclass(frozen=True)
class _Place:
    """Where a tensor of the format lives in a transformers model: a parameter, the order of its rows, an offset."""

    parameter: torch.Tensor
    rows: npt.NDArray[np.intp]
    offset: float
    shape: tuple[int, ...]

    @staticmethod
    def of(spec: TensorSpec, header: Header, family: Family, model: Any) -> _Place:
        parameter = model.get_parameter(_hf_name(spec, family))
        is_offset_norm = spec.role.endswith("norm") and spec.role != "lnorm"
        offset = family.norm_offset if is_offset_norm else 0.0
        return _Place(parameter, _rows(spec, header, len(parameter)), offset, spec.shape)

    def read(self) -> npt.NDArray[np.float32]:
        values = self.parameter.detach().numpy()[self.rows].reshape(self.shape)
        return values + np.float32(self.offset)

    def write(self, values: npt.NDArray[np.float32]) -> None:
        with torch.no_grad():
            shaped = (values - np.float32(self.offset)).reshape(-1, *self.parameter.shape[1:])
            self.parameter[self.rows] = torch.from_numpy(shaped)


def _hf_name(spec: TensorSpec, family: Family) -> str:
    if spec.layer is None:
        names = {"tok_emb": "model.embed_tokens", "final_norm": "model.norm", "wcls": "lm_head"}
        return names[spec.role] + ".weight"
    name = f"model.layers.{spec.layer}.{family.names[spec.role]}"
    return name if name.endswith(_WITHOUT_SUFFIX) else name + ".weight"


def _rows(spec: TensorSpec, header: Header, n_rows: int) -> npt.NDArray[np.intp]:
    """The rows of the parameter in the order of the format."""
    rows = np.arange(n_rows)
    if header.attn_gate and spec.role in ("wq", "wg"):  # per head: query rows, then gate rows
        rows = rows.reshape(header.n_heads, 2, -1)[:, 0 if spec.role == "wq" else 1].reshape(-1)
    if spec.role in _PERMUTED:
        rows = rows[interleaved_order(len(rows) // header.head_size, header.head_size, header.rot_size)]
    return rows
