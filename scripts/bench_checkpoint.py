"""Unquantized checkpoints of known shapes with random bfloat16 weights: as a Hugging Face folder, and as .gguf."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from bench_models import gguf_writer

from krafla_cli.convert.families import FAMILIES
from krafla_cli.formats.mlb import Header, TensorSpec, tensors

_CHUNK = 1 << 22


def model_type(header: Header) -> str:
    """The family that a shape's header belongs to."""
    return "qwen2" if header.qkv_bias else "qwen3" if header.qk_norm else "llama"


def bf16_weights(header: Header) -> Iterator[tuple[TensorSpec, npt.NDArray[np.uint16]]]:
    """Each tensor with small random values as bfloat16 bits, the same every time."""
    rng = np.random.default_rng(0)
    pool = ((0.02 * rng.standard_normal(_CHUNK, np.float32)).view(np.uint32) >> 16).astype(np.uint16)
    for spec in tensors(header):
        start = int(rng.integers(0, 1000))
        yield spec, np.resize(pool[start:], spec.n_weights).reshape(spec.shape)


def _config(header: Header) -> dict[str, object]:
    return {
        "model_type": model_type(header),
        "vocab_size": header.vocab,
        "hidden_size": header.dim,
        "intermediate_size": header.hidden_dim,
        "num_hidden_layers": header.n_layers,
        "num_attention_heads": header.n_heads,
        "num_key_value_heads": header.n_kv_heads,
        "head_dim": header.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": header.max_seq,
        "rms_norm_eps": header.norm_eps,
        "rope_theta": header.rope_theta,
        "tie_word_embeddings": bool(header.shared_classifier),
    }


def write_checkpoint(folder: Path, header: Header) -> None:
    """config.json and model.safetensors of the shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(header)))
    parts = next(f.parts for f in FAMILIES if model_type(header) in f.model_types)
    entries, offset = {}, 0
    for spec in tensors(header):
        name = "model." + parts[spec.role].name.format(i=spec.layer)
        end = offset + 2 * spec.n_weights
        entries[name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for _, values in bf16_weights(header):
            f.write(values.tobytes())


def write_source_gguf(path: Path, header: Header, arch: str) -> None:
    """The same weights as .gguf: matrices in bfloat16, norms and biases in float32."""
    import gguf

    writer, names = gguf_writer(path, header, arch)
    for spec, values in bf16_weights(header):
        name = names[spec.role].format(spec.layer)
        if spec.is_quantized:
            writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, (values.astype(np.uint32) << 16).view(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
