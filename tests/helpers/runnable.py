"""A random model with a small tokenizer and settings beside it: everything that ``mlb run`` needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from krafla_cli.formats.mlb import Header
from krafla_cli.formats.sidecar import Sidecar, file_sha256, read_sidecar, sidecar_path
from tests.helpers.models import Float32s, random_model, tiny, write_model

CONTROL = ["<|end|>", "<|user|>", "<|bot|>"]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def small_tokenizer() -> Tokenizer:
    """Byte-level BPE: 3 control tokens (0 to 2), 256 bytes, a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the rat sat on the cat"] * 3, trainer)
    return tokenizer


def write_changed(model: Path, header: Header, arrays: dict[str, Float32s]) -> None:
    """Other weights for a model of :func:`write_runnable`, and settings that know them."""
    write_model(model, header, arrays)
    settings = read_sidecar(sidecar_path(model))
    sidecar_path(model).write_bytes(replace(settings, sha256=file_sha256(model)).to_bytes())


def write_runnable(folder: Path, header: Header | None = None, seed: int = 0, **settings: Any) -> Path:
    """Writes m.mlb, m.tokenizer.json and m.json; ``settings`` are the sidecar's, with a chat template by default."""
    path = folder / "m.mlb"
    tokenizer = small_tokenizer()
    random_model(path, header or tiny(vocab=tokenizer.get_vocab_size()), seed)
    tokenizer.save(str(folder / "m.tokenizer.json"))
    sidecar = Sidecar(**{"sha256": file_sha256(path), "chat_template": TEMPLATE, "stop_ids": (0,), **settings})
    sidecar_path(path).write_bytes(sidecar.to_bytes())
    return path
