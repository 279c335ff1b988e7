"""Every reader of files from strangers, with small valid files to start damaging from. Used by scripts/fuzz.py."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from fuzz import Reader, repair_safetensors_length, repair_sha256

from krafla_cli.convert.companions import read_companions, sampling, special_tokens, stop_ids
from krafla_cli.convert.config import ModelConfig, read_config
from krafla_cli.convert.families import family_of
from krafla_cli.convert.sources.folder import SAFETENSORS, open_folder
from krafla_cli.convert.sources.torch_bin import TorchSource
from krafla_cli.embed.registry import add_license, read_registry
from krafla_cli.formats import gguf, lemb, mlb_file, mli, mllm, mlt
from krafla_cli.formats.index_folder import MANIFEST, Manifest, read_manifest
from krafla_cli.formats.safetensors import SafetensorsFile
from krafla_cli.formats.sidecar import Sidecar, read_sidecar
from krafla_cli.formats.text import printable
from krafla_cli.report.inspect import describe, render
from krafla_cli.tokenizer import convert_tokenizer, load_tokenizer
from tests.convert.test_importance import DIMENSIONS, filled
from tests.embed.students import header_of, random_model
from tests.formats.test_lemb import golden_static_file
from tests.formats.test_mlb import FULL, MINIMAL, write
from tests.formats.test_mllm import entry, v1, v2
from tests.helpers import gguf_bytes
from tests.helpers.llama import CONFIG
from tests.tokenizer import toys


def readers() -> list[Reader]:
    """All of them."""
    return [
        Reader("mlb", "m.mlb", [write(FULL), write(MINIMAL)], _read_mlb),
        Reader("mlt", "t.mlt", [_mlt()], _read_mlt),
        Reader("mli", "i.mli", [filled(DIMENSIONS).to_bytes()], _read_mli),
        Reader("lemb", "m.bin", [golden_static_file(), _lemb()], _read_lemb, repair=repair_sha256),
        Reader("gguf", "m.gguf", [_gguf()], _read_gguf),
        Reader("mllm", "m.mllm", _mllm(), _read_mllm),
        Reader("safetensors", "m.safetensors", [_safetensors()], _read_safetensors, repair=repair_safetensors_length),
        Reader("torch .bin", "pytorch_model.bin", _torch_files(), _read_torch),
        Reader("tokenizer.json", "tokenizer.json", [_tokenizer_json()], _read_tokenizer, is_text=True),
        Reader("config.json", "config.json", [json.dumps(CONFIG).encode()], _read_config, is_text=True),
        Reader("sidecar", "m.json", [_sidecar()], read_sidecar, is_text=True),
        Reader("companions", "generation_config.json", [_generation_config()], _read_companions, is_text=True),
        Reader("weights index", f"{SAFETENSORS}.index.json", [_weights_index()], _read_weights_index, is_text=True),
        Reader("manifest", MANIFEST, [_manifest()], _read_manifest, is_text=True),
        Reader("registry", "keys.jsonl", [_registry()], _read_registry, is_text=True),
    ]


def _show(path: Path) -> None:
    """What ``mlb inspect --tensors`` prints must be safe too."""
    for line in render(describe(path, None, True)):
        if line != printable(line, len(line)):
            raise RuntimeError(f"control characters in {line!r}")


def _read_mlb(path: Path) -> None:
    if mlb_file.validate(path).valid:
        model = mlb_file.open_mlb(path)
        for spec in model.tensors.values():
            if spec.is_quantized:
                model.quantized(spec.name)
            elif spec.encoding == "f32":
                model.float32(spec.name)
        _show(path)
    mlb_file.open_mlb(path)


def _read_mlt(path: Path) -> None:
    if mlt.validate(path).valid:
        load_tokenizer(path).encode("hello <s> 12")
        _show(path)
    mlt.read(path)


def _read_mli(path: Path) -> None:
    mli.validate(path).strict()
    mli.read(path)
    _show(path)


def _read_lemb(path: Path) -> None:
    lemb.validate(path).strict()
    lemb.read(path)
    _show(path)


def _read_gguf(path: Path) -> None:
    gguf.validate(path).strict()
    gguf.open_gguf(path)
    _show(path)


def _read_mllm(path: Path) -> None:
    mllm.validate(path).strict()
    mllm.open_mllm(path)
    _show(path)


def _read_safetensors(path: Path) -> None:
    file = SafetensorsFile(path)
    for name in file.tensors:
        file.array(name)


def _read_torch(path: Path) -> None:
    source = TorchSource("t", {path.name: path}, None)
    for name in source.shapes():
        source.array(name)


def _read_tokenizer(path: Path) -> None:
    load_tokenizer(path).encode("hello 12")
    convert_tokenizer(path)


def _read_config(path: Path) -> None:
    config = read_config(path.parent)
    family = family_of(config)
    family.header(config.with_defaults(family.defaults))


def _read_companions(path: Path) -> None:
    """The same damage in each of the files beside the weights."""
    for name in ("tokenizer_config.json", "chat_template.json"):
        shutil.copy(path, path.with_name(name))
    config = ModelConfig(CONFIG, "config.json")
    found = read_companions(path.parent)
    stop_ids(config, found, None, 40)
    sidecar = Sidecar("0" * 64, sampling=sampling(found), special_tokens=special_tokens(found))
    path.with_name("back.json").write_bytes(sidecar.to_bytes())
    read_sidecar(path.with_name("back.json"))


def _read_weights_index(path: Path) -> None:
    (path.parent / "a.safetensors").write_bytes(_safetensors())
    source = open_folder(path.parent)
    for name in source.shapes():
        if source.dtype(name) == "F32":
            source.array(name)


def _read_manifest(path: Path) -> None:
    read_manifest(path.parent)


def _read_registry(path: Path) -> None:
    path.chmod(0o600)
    read_registry(path)


# --- valid files


def _mlt() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(_tokenizer_json())
        return mlt.to_bytes(convert_tokenizer(path))


def _tokenizer_json() -> bytes:
    document = toys.byte_level(toys.sequence(toys.split(toys.QWEN2), toys.BYTE_LEVEL), toys.NFC, vocab_size=300)
    return json.dumps(document).encode()


def _lemb() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.bin"
        lemb.write(path, random_model(header_of("int4", "ternary"), 0))
        return path.read_bytes()


def _gguf() -> bytes:
    pairs = [
        gguf_bytes.ARCHITECTURE,
        gguf_bytes.pair("general.name", 8, "tiny"),
        gguf_bytes.pair("llama.rope.freq_base", 6, 1e4),
        gguf_bytes.pair("tokenizer.ggml.tokens", 9, (8, ["a", "b", "c"])),
        gguf_bytes.pair("tokenizer.ggml.scores", 9, (6, [0.0, 1.0, 2.0])),
    ]
    tensors = [gguf_bytes.description("a", (32, 2), 0, 0), gguf_bytes.description("b", (32,), 8, 256)]
    return gguf_bytes.gguf(pairs, tensors, bytes(256) + bytes(34))


def _mllm() -> list[bytes]:
    at = 532 + 2 * 352
    entries = (entry(0, "a", 0, 64, at, (4, 4)), entry(1, "b", 8, 34, at + 64, (32,)))
    return [v1(("a", bytes(16), 0), ("b", bytes(34), 8)), v2(*entries, data=bytes(98))]


def _safetensors() -> bytes:
    return safetensors.numpy.save(
        {"a.weight": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float16), "c": np.arange(3, dtype=np.int64)}
    )


def _torch_files() -> list[bytes]:
    new, old = io.BytesIO(), io.BytesIO()
    state = {"a.weight": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    torch.save(state, new)
    torch.save(state, old, _use_new_zipfile_serialization=False)
    return [new.getvalue(), old.getvalue()]


def _sidecar() -> bytes:
    return Sidecar(
        "0" * 64, "{{ messages }}", (1, 2), {"temperature": 0.5}, {"bos_token": "<s>"}, {"tool": "x"}
    ).to_bytes()


def _generation_config() -> bytes:
    document = {
        "eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0,
        "repetition_penalty": 1.05, "eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": "{{ 1 }}",
    }  # fmt: skip
    return json.dumps(document).encode()


def _weights_index() -> bytes:
    weight_map = {"a.weight": "a.safetensors", "b": "a.safetensors"}
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def _manifest() -> bytes:
    return Manifest(1, "m", "1.0.0", 8, 7, True, "0" * 64, "../m.bin", "int8", 3).to_bytes()


def _registry() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.jsonl"
        add_license(path, 7, "Somebody")
        add_license(path, 8, "Somebody else")
        return path.read_bytes()
