"""Qwen3.5, dense: three of four layers are linear attention (gated delta rule), the others gated attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import LLAMA_PARTS, QK_NORM_PARTS, Family, Part, llama_header, refuse_flags
from krafla_cli.convert.rope_config import FULL
from krafla_cli.formats.mlb import LAYER_LINEAR, Header

LINEAR = "linear_attention"


def _query_rows(header: Header) -> npt.NDArray[np.intp]:
    """q_proj holds, for each head, its query rows and then its gate rows."""
    per_head = np.arange(2 * header.q_dim).reshape(header.n_heads, 2, header.head_size)
    return per_head[:, 0].reshape(-1)


def _gate_rows(header: Header) -> npt.NDArray[np.intp]:
    per_head = np.arange(2 * header.q_dim).reshape(header.n_heads, 2, header.head_size)
    return per_head[:, 1].reshape(-1)


def _q_proj_rows(header: Header) -> int:
    return 2 * header.q_dim


_Q_PROJ = "layers.{i}.self_attn.q_proj.weight"
_DELTA = "layers.{i}.linear_attn."
PARTS = LLAMA_PARTS | {
    "attn_norm": Part("layers.{i}.input_layernorm.weight", plus_one=True),
    "ffn_norm": Part("layers.{i}.post_attention_layernorm.weight", plus_one=True),
    "final_norm": Part("norm.weight", plus_one=True),
    **{role: Part(part.name, plus_one=True) for role, part in QK_NORM_PARTS.items()},
    "wq": Part(_Q_PROJ, rows=_query_rows, source_rows=_q_proj_rows),
    "wg": Part(_Q_PROJ, rows=_gate_rows, source_rows=_q_proj_rows),
    "lqkv": Part(_DELTA + "in_proj_qkv.weight"),
    "lz": Part(_DELTA + "in_proj_z.weight"),
    "lb": Part(_DELTA + "in_proj_b.weight"),
    "la": Part(_DELTA + "in_proj_a.weight"),
    "lconv": Part(_DELTA + "conv1d.weight", middle_axis=True),
    "dt_bias": Part(_DELTA + "dt_bias"),
    "A_log": Part(_DELTA + "A_log"),
    # The gated norm of the output multiplies by w as it is, unlike the other norms.
    "lnorm": Part(_DELTA + "norm.weight"),
    "lout": Part(_DELTA + "out_proj.weight"),
}


def header(config: ModelConfig) -> dict[str, Any]:
    """Header fields and flags."""
    refuse_flags(config, attention_bias="bias of the attention output")
    fields = llama_header(config)
    n_layers = fields["n_layers"]
    types = config.layer_list("layer_types", n_layers, (FULL, LINEAR))
    if types is None:
        interval = config.integer("full_attention_interval")
        types = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(n_layers)]
    fields |= {"qk_norm": 1, "attn_gate": 1}
    return fields | _linear_fields(config, types) if LINEAR in types else fields


def _linear_fields(config: ModelConfig, types: list[str]) -> dict[str, Any]:
    return {
        "layer_flags": 1,
        "flags": bytes(LAYER_LINEAR if t == LINEAR else 0 for t in types),
        "lin_k_heads": config.integer("linear_num_key_heads"),
        "lin_v_heads": config.integer("linear_num_value_heads"),
        "lin_k_dim": config.integer("linear_key_head_dim"),
        "lin_v_dim": config.integer("linear_value_head_dim"),
        "lin_conv": config.integer("linear_conv_kernel_dim"),
    }


FAMILY = Family(
    name="qwen3_5",
    title="Qwen3.5 (dense; text, and the language model of image-text checkpoints)",
    model_types=("qwen3_5_text", "qwen3_5"),
    header=header,
    parts=PARTS,
    defaults={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
    },
    # Blocks for multi-token prediction; they take no part in ordinary generation.
    left_out=(r"^(model\.)?mtp\.",),
)
