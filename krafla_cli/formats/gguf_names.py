"""How GGUF files name the parts of a model, by architecture: shared by conversion and export.

Source: the GGUF specification ("Standardized tensor names") and the tensor lists of the gguf package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_LLAMA = {
    "tok_emb": "token_embd.weight",
    "attn_norm": "blk.{i}.attn_norm.weight",
    "wq": "blk.{i}.attn_q.weight",
    "wk": "blk.{i}.attn_k.weight",
    "wv": "blk.{i}.attn_v.weight",
    "wo": "blk.{i}.attn_output.weight",
    "ffn_norm": "blk.{i}.ffn_norm.weight",
    "w1": "blk.{i}.ffn_gate.weight",
    "w2": "blk.{i}.ffn_down.weight",
    "w3": "blk.{i}.ffn_up.weight",
    "final_norm": "output_norm.weight",
    "wcls": "output.weight",
}
_BIASES = {"bq": "blk.{i}.attn_q.bias", "bk": "blk.{i}.attn_k.bias", "bv": "blk.{i}.attn_v.bias"}
_QK_NORMS = {"q_norm": "blk.{i}.attn_q_norm.weight", "k_norm": "blk.{i}.attn_k_norm.weight"}
_POST_NORMS = {"post_attn_norm": "blk.{i}.post_attention_norm.weight", "post_ffn_norm": "blk.{i}.post_ffw_norm.weight"}
_QKV = dict.fromkeys(("wq", "wk", "wv"), "blk.{i}.attn_qkv.weight")
_GATE_UP = dict.fromkeys(("w1", "w3"), "blk.{i}.ffn_up.weight")
_QWEN35 = {
    "ffn_norm": "blk.{i}.post_attention_norm.weight",
    "wg": "blk.{i}.attn_q.weight",  # each head's query rows, then its gate rows
    "lqkv": "blk.{i}.attn_qkv.weight",
    "lz": "blk.{i}.attn_gate.weight",
    "lb": "blk.{i}.ssm_beta.weight",
    "la": "blk.{i}.ssm_alpha.weight",
    "lconv": "blk.{i}.ssm_conv1d.weight",
    "dt_bias": "blk.{i}.ssm_dt.bias",
    "A_log": "blk.{i}.ssm_a",
    "lnorm": "blk.{i}.ssm_norm.weight",
    "lout": "blk.{i}.ssm_out.weight",
}

ROPE_FREQS = "rope_freqs.weight"  # factors that divide the frequencies, one for each pair (llama3 scaling)

LLAMA3_KEY = "mlb.rope.llama3"  # ours: factor, low, high, original context behind those factors
ATTN_FACTOR_KEY = "mlb.rope.attn_factor"  # ours: YaRN's factor on cos and sin, which GGUF states as a ratio


@dataclass(frozen=True)
class Architecture:
    """One value of general.architecture.

    ``model_type``: what Hugging Face calls it. ``interleaved``: rows of q and k lie in pairs (2i, 2i + 1), as in .mlb;
    else in halves. ``tensors``: role -> name, "{i}" for the layer; roles with one name share a matrix, stacked in the
    order of the roles. ``own_classifier``: output.weight may be in the file. ``reads_window``: llama.cpp applies
    attention.sliding_window. ``layout``: the family's key in ``parts.LAYOUTS``, where that is not model_type.
    """

    name: str
    model_type: str
    tensors: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    interleaved: bool = False
    own_classifier: bool = True
    reads_window: bool = False
    layout: str = ""


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("llama", "llama", interleaved=True),
        Architecture("qwen2", "qwen2", _LLAMA | _BIASES),
        Architecture("qwen3", "qwen3", _LLAMA | _QK_NORMS),
        Architecture("qwen35", "qwen3_5_text", _LLAMA | _QK_NORMS | _QWEN35, layout="qwen3_5"),
        Architecture("gemma2", "gemma2", _LLAMA | _POST_NORMS, own_classifier=False, reads_window=True),
        Architecture("gemma3", "gemma3_text", _LLAMA | _QK_NORMS | _POST_NORMS, reads_window=True, layout="gemma3"),
        Architecture("smollm3", "smollm3", interleaved=True),
        Architecture("phi3", "phi3", _LLAMA | _QKV | _GATE_UP),
        Architecture("glm4", "glm4", _LLAMA | _BIASES | _POST_NORMS | _GATE_UP, interleaved=True),
        Architecture("seed_oss", "seed_oss", _LLAMA | _BIASES | {"ffn_norm": "blk.{i}.post_attention_norm.weight"}),
        Architecture("ernie4_5", "ernie4_5", interleaved=True),
    )
}
