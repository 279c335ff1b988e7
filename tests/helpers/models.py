"""Small .mlb files with random weights, from a header alone: for every test that needs a model but no checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.formats.mlb import (
    LAYER_LINEAR,
    LAYER_LOCAL_ROPE,
    LAYER_NO_ROPE,
    LAYER_WINDOW,
    ROPE_LINEAR,
    ROPE_LLAMA3,
    ROPE_YARN,
    WTYPE_Q8_0,
    Header,
    TensorSpec,
    tensors,
)
from krafla_cli.formats.mlb_file import MlbWriter
from krafla_cli.quant.matrix import dequantize, quantize

Float32s = npt.NDArray[np.float32]

TINY = Header(
    dim=64,
    n_layers=3,
    n_heads=8,
    n_kv_heads=2,
    hidden_dim=96,
    vocab=101,
    max_seq=256,
    wtype=WTYPE_Q8_0,
    norm_eps=1e-6,
    scale_f16=1,
    head_dim=16,
)


def tiny(**changes: Any) -> Header:
    """The small header with ``changes``; GQA 8/2, head_dim other than dim / n_heads, an odd number of layers."""
    return replace(TINY, **changes)


# Every feature of the format in some combination that a family has, and in some that none has.
HEADERS: dict[str, Header] = {
    "plain": tiny(),
    "shared-f32-scales": tiny(shared_classifier=1, scale_f16=0),
    "bias-qk_norm": tiny(qkv_bias=1, qk_norm=1),
    "window": tiny(sliding_window=7),
    "llama3": tiny(
        rope_type=ROPE_LLAMA3,
        rope_factor=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_orig_max_seq=64,
    ),
    "linear-rope": tiny(rope_type=ROPE_LINEAR, rope_factor=4.0),
    "yarn": tiny(
        rope_type=ROPE_YARN,
        rope_factor=4.0,
        rope_low_freq_factor=32.0,
        rope_high_freq_factor=1.0,
        rope_orig_max_seq=64,
        rope_attn_factor=1.1386,
    ),
    "partial-rope": tiny(rot_dim=4),
    "no-rope-flags": tiny(layer_flags=1, flags=bytes([0, LAYER_NO_ROPE, 0])),
    "gemma2": tiny(
        layer_flags=1,
        flags=bytes([LAYER_WINDOW, 0, LAYER_WINDOW]),
        sliding_window=5,
        act=1,
        post_norms=1,
        embed_scale=8.0,
        attn_scale=0.3,
        attn_softcap=20.0,
        final_softcap=10.0,
        shared_classifier=1,
    ),
    "gemma3": tiny(
        layer_flags=1,
        flags=bytes([LAYER_WINDOW | LAYER_LOCAL_ROPE, LAYER_WINDOW | LAYER_LOCAL_ROPE, 0]),
        sliding_window=6,
        rope_local_theta=10000.0,
        rope_theta=1e6,
        rope_type=ROPE_LINEAR,
        rope_factor=8.0,
        act=1,
        post_norms=1,
        qk_norm=1,
        embed_scale=8.0,
    ),
    "hybrid": tiny(
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
    "everything": tiny(
        layer_flags=1,
        flags=bytes([LAYER_LINEAR, LAYER_WINDOW | LAYER_LOCAL_ROPE, LAYER_WINDOW | LAYER_NO_ROPE]),
        wtype=2,
        q8_mask=2 | 8 | 64,
        sliding_window=9,
        rope_local_theta=5000.0,
        qkv_bias=1,
        qk_norm=1,
        attn_gate=1,
        post_norms=1,
        act=1,
        embed_scale=2.0,
        attn_scale=0.2,
        attn_softcap=15.0,
        final_softcap=12.0,
        rot_dim=8,
        lin_k_heads=2,
        lin_v_heads=8,
        lin_k_dim=12,
        lin_v_dim=20,
        lin_conv=3,
        scale_f16=0,
    ),
}


def random_array(spec: TensorSpec, header: Header, rng: np.random.Generator) -> Float32s:
    """Values of a plausible size for a tensor: products keep the size of their inputs, norms are around 1."""
    normal = rng.standard_normal(spec.shape).astype(np.float32)
    if spec.is_quantized:
        return normal if spec.role == "tok_emb" else normal * np.float32(1.5 / np.sqrt(spec.shape[1]))
    if spec.role.endswith("norm"):
        return 1 + np.float32(0.3) * normal
    return normal * np.float32(0.5)


def random_arrays(header: Header, seed: int = 0) -> dict[str, Float32s]:
    """Weights for every tensor of ``header`` by name, before quantization."""
    rng = np.random.default_rng(seed)
    return {spec.name: random_array(spec, header, rng) for spec in tensors(header) if spec.encoding != "u8"}


def write_model(path: Path, header: Header, arrays: dict[str, Float32s]) -> dict[str, Float32s]:
    """Writes ``arrays`` (by tensor name, in the format's layout) as a .mlb; returns them as the file holds them."""
    stored = {}
    with path.open("wb") as f:
        writer = MlbWriter(f, header)
        for spec in tensors(header):
            if spec.encoding == "u8":
                continue
            values = np.ascontiguousarray(arrays[spec.name], np.float32)
            if spec.is_quantized:
                quantized = quantize(values, spec.encoding, bool(header.scale_f16))
                writer.write(spec.name, quantized.q, quantized.d)
                values = dequantize(quantized.q, quantized.d, spec.encoding, *spec.shape)
            else:
                writer.write(spec.name, values)
            stored[spec.name] = values
        writer.finish()
    return stored


def random_model(path: Path, header: Header = TINY, seed: int = 0) -> dict[str, Float32s]:
    """Writes a model with random weights; returns them, dequantized, by tensor name."""
    return write_model(path, header, random_arrays(header, seed))
