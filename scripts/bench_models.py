"""Models of well-known shapes with random weights, to be timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.formats.mlb import LAYER_LINEAR, WTYPE_Q4_0, WTYPE_Q8_0, Header, TensorSpec, tensors
from krafla_cli.formats.mlb_file import MlbWriter

WTYPES = {"q4": WTYPE_Q4_0, "q8": WTYPE_Q8_0}
BLOCK = 32
MAX_SEQ = 32768


@dataclass(frozen=True)
class Shape:
    """A model's header, and GGUF's name of its architecture (None: its conversion is not compared)."""

    header: Header
    gguf_arch: str | None = None

    def with_wtype(self, wtype: str) -> Header:
        return replace(self.header, wtype=WTYPES[wtype])


_COMMON: dict[str, Any] = {"max_seq": MAX_SEQ, "shared_classifier": 1, "scale_f16": 1, "norm_eps": 1e-6}

SHAPES = {
    "qwen2.5-0.5b": Shape(
        Header(
            dim=896,
            n_layers=24,
            n_heads=14,
            n_kv_heads=2,
            hidden_dim=4864,
            vocab=151936,
            rope_theta=1e6,
            qkv_bias=1,
            **_COMMON,
        ),
        "qwen2",
    ),
    "smollm2-135m": Shape(
        Header(
            dim=576,
            n_layers=30,
            n_heads=9,
            n_kv_heads=3,
            hidden_dim=1536,
            vocab=49152,
            rope_theta=1e5,
            **_COMMON,
        ),
        "llama",
    ),
    "qwen3-1.7b": Shape(
        Header(
            dim=2048,
            n_layers=28,
            n_heads=16,
            n_kv_heads=8,
            head_dim=128,
            hidden_dim=6144,
            vocab=151936,
            rope_theta=1e6,
            qk_norm=1,
            **_COMMON,
        ),
        "qwen3",
    ),
    "qwen3.5-0.8b": Shape(
        Header(
            dim=1024,
            n_layers=24,
            n_heads=8,
            n_kv_heads=2,
            head_dim=256,
            hidden_dim=3584,
            vocab=248320,
            rope_theta=1e7,
            rot_dim=64,
            qk_norm=1,
            attn_gate=1,
            layer_flags=1,
            flags=bytes([LAYER_LINEAR, LAYER_LINEAR, LAYER_LINEAR, 0] * 6),
            lin_k_heads=16,
            lin_v_heads=16,
            lin_k_dim=128,
            lin_v_dim=128,
            lin_conv=4,
            **_COMMON,
        )
    ),
}


def weights(header: Header) -> Iterator[tuple[TensorSpec, tuple[npt.NDArray[Any], ...]]]:
    """Each tensor with its arrays as the file holds them: small random weights, the same every time."""
    rng = np.random.default_rng(0)
    for spec in tensors(header):
        if spec.encoding == "u8":
            continue
        if not spec.is_quantized:
            values = 0.02 * rng.standard_normal(spec.shape, np.float32)
            yield spec, (1 + values if spec.role.endswith("norm") else values,)
            continue
        q = rng.integers(0, 256, spec.n_bytes, np.uint8)
        largest = 8.0
        if spec.encoding == "q8_0":
            q = np.maximum(q.view(np.int8), -127).view(np.uint8)
            largest = 127.0
        d = rng.uniform(0.5, 1.5, spec.n_weights // BLOCK) * 1.5 / largest / np.sqrt(spec.shape[1])
        yield spec, (q, d.astype(np.float16))


def write_mlb(path: Path, header: Header) -> None:
    """Writes the model as .mlb."""
    with path.open("wb") as f:
        writer = MlbWriter(f, header)
        for spec, arrays in weights(header):
            writer.write(spec.name, *arrays)
        writer.finish()


def gguf_writer(path: Path, header: Header, arch: str) -> tuple[Any, dict[str, str]]:
    """A writer of a .gguf with the header's metadata, and the names of its tensors by role."""
    import gguf

    h = header
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(h.max_seq)
    writer.add_embedding_length(h.dim)
    writer.add_block_count(h.n_layers)
    writer.add_feed_forward_length(h.hidden_dim)
    writer.add_head_count(h.n_heads)
    writer.add_head_count_kv(h.n_kv_heads)
    writer.add_key_length(h.head_size)
    writer.add_value_length(h.head_size)
    writer.add_rope_dimension_count(h.head_size)
    writer.add_rope_freq_base(h.rope_theta)
    writer.add_layer_norm_rms_eps(h.norm_eps)
    writer.add_vocab_size(h.vocab)
    writer.add_tokenizer_model("no_vocab")
    return writer, _GGUF_NAMES


_GGUF_NAMES = {
    "tok_emb": "token_embd.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "wq": "blk.{}.attn_q.weight",
    "wk": "blk.{}.attn_k.weight",
    "wv": "blk.{}.attn_v.weight",
    "wo": "blk.{}.attn_output.weight",
    "bq": "blk.{}.attn_q.bias",
    "bk": "blk.{}.attn_k.bias",
    "bv": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "w1": "blk.{}.ffn_gate.weight",
    "w2": "blk.{}.ffn_down.weight",
    "w3": "blk.{}.ffn_up.weight",
    "final_norm": "output_norm.weight",
}
