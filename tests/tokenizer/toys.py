"""Small tokenizers inside the pipelines of real ones: the same parts, a vocabulary of a few hundred pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from krafla_cli.tokenizer.corpus import SENTENCES

Json = dict[str, Any]
TRAINING = [*SENTENCES, *(f" {s.lower()} {s}" for s in SENTENCES), "hello hello  hello\n\nhello 123 1234 12 1 " * 20]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2_BYTE_LEVEL: Json = {**BYTE_LEVEL, "use_regex": True}
DIGITS: Json = {"type": "Digits", "individual_digits": True}
NFC: Json = {"type": "NFC"}
PREPEND: Json = {"type": "Prepend", "prepend": "▁"}
SPACES: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def sequence(*parts: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def normalizers(*parts: Json) -> Json:
    return {"type": "Sequence", "normalizers": list(parts)}


def metaspace(scheme: str, split_words: bool = False) -> Json:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split_words}


def added(token_id: int, content: str, **flags: bool) -> Json:
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **defaults, **flags}


def template(*before: str, after: tuple[str, ...] = (), ids: dict[str, int] | None = None) -> Json:
    """A post-processor that writes ``before`` the text and ``after`` it."""

    def special(name: str) -> Json:
        return {"SpecialToken": {"id": name, "type_id": 0}}

    single = [*map(special, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(special, after)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    specials = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in (ids or {}).items()}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}


def _trained(pre_tokenizer: Json | None, vocab_size: int, alphabet: list[str], normalizer: Json | None) -> Json:
    """The vocabulary and merges of a BPE trained behind ``pre_tokenizer``."""
    shell = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    shell |= {"truncation": None, "padding": None, "post_processor": None, "decoder": None}
    shell["model"] = json.loads(Tokenizer(models.BPE()).to_str())["model"]
    tokenizer = Tokenizer.from_str(json.dumps(shell))
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TRAINING, trainer)
    model: Json = json.loads(tokenizer.to_str())["model"]
    return model


def byte_level(
    pre_tokenizer: Json,
    normalizer: Json | None = None,
    added_tokens: list[str] | None = None,
    vocab_size: int = 600,
    **document: Any,
) -> Json:
    """A tokenizer.json of byte-level BPE; the added tokens get the ids after the vocabulary."""
    model = _trained(pre_tokenizer, vocab_size, pre_tokenizers.ByteLevel.alphabet(), normalizer)
    contents = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] if added_tokens is None else added_tokens
    first = len(model["vocab"])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(first + i, c) for i, c in enumerate(contents)],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": dict(GPT2_BYTE_LEVEL),
        "model": model,
    } | document


def sentencepiece(
    normalizer: Json | None, pre_tokenizer: Json | None = None, vocab_size: int = 900, **document: Any
) -> Json:
    """A tokenizer.json of SentencePiece-style BPE: <unk>, <s>, </s>, 256 bytes, then the trained pieces."""
    trained = _trained(sequence(metaspace("always", True)), vocab_size, [], None)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += [p for p in trained["vocab"] if p not in pieces]
    model = {**trained, "vocab": {p: i for i, p in enumerate(pieces)}, "byte_fallback": True}
    model |= {"unk_token": "<unk>", "fuse_unk": True}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": template("<s>", ids={"<s>": 1}),
        "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        "model": model,
    } | document


def write(folder: Path, document: Json, config: Json | None = None) -> Path:
    """``document`` as ``folder``/tokenizer.json, ``config`` as tokenizer_config.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), "utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder
