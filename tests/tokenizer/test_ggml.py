"""Tokenizers of GGUF files: from metadata to a tokenizer.json and back."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from krafla_cli.errors import FormatError, UnsupportedError
from krafla_cli.formats import mlt
from krafla_cli.formats.mlt import Flag
from krafla_cli.tokenizer.convert import convert_source
from krafla_cli.tokenizer.corpus import SENTENCES
from krafla_cli.tokenizer.ggml import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GgmlTokenizer,
    document_of,
    ggml_of,
)
from krafla_cli.tokenizer.source import source_of
from tests.tokenizer import toys

Json = dict[str, Any]
Toy = Callable[[str], Json]
LINES = [*SENTENCES, "<|im_start|>user\nhi<|im_end|>", " <s>a</s> b", "hello  hello\n\n123"]


def library(document: Json) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(document))


def ids(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(line).ids for line in LINES]


def metadata(document: Json, model: str, pre: str | None = None, **more: Any) -> GgmlTokenizer:
    """What llama.cpp's converter writes of a byte-level tokenizer.json."""
    vocab = dict(document["model"]["vocab"])
    vocab |= {t["content"]: t["id"] for t in document["added_tokens"]}
    special = {t["content"]: t["special"] for t in document["added_tokens"]}
    tokens = [text for text, _ in sorted(vocab.items(), key=lambda item: item[1])]
    types = [NORMAL if t not in special else CONTROL if special[t] else USER_DEFINED for t in tokens]
    merges = [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]]
    return GgmlTokenizer(model, tokens, types, pre, merges=merges, **more)


@pytest.mark.parametrize(
    ("steps", "normalizer", "ignore", "pre"),
    [
        (toys.sequence(toys.DIGITS, toys.GPT2_BYTE_LEVEL), None, False, "smollm"),
        (toys.sequence(toys.split(toys.LLAMA3), toys.BYTE_LEVEL), None, True, "llama-bpe"),
        (toys.sequence(toys.split(toys.LLAMA3), toys.BYTE_LEVEL), None, False, "smaug-bpe"),
        (toys.sequence(toys.split(toys.QWEN2), toys.BYTE_LEVEL), toys.NFC, False, "qwen2"),
        (toys.sequence(toys.split(toys.QWEN35), toys.BYTE_LEVEL), toys.NFC, False, "qwen35"),
        (toys.GPT2_BYTE_LEVEL, None, False, "gpt-2"),
    ],
)
def test_byte_level_both_ways(steps: Json, normalizer: Json | None, ignore: bool, pre: str) -> None:
    document = toys.byte_level(steps, normalizer)
    document["model"]["ignore_merges"] = ignore
    tokenizer = library(document)
    ggml = metadata(document, "gpt2", pre, add_bos=False)
    assert ids(library(document_of(ggml, "x"))) == ids(tokenizer)
    exported = ggml_of(tokenizer, tokenizer.get_vocab_size(), {}).ggml
    assert (exported.model, exported.pre, exported.add_bos) == ("gpt2", pre, False)
    assert (list(exported.tokens), list(exported.types)) == (list(ggml.tokens), list(ggml.types))
    assert list(exported.merges) == list(ggml.merges)


def test_bos_is_as_stated_or_as_the_splitting_implies() -> None:
    document = toys.byte_level(toys.sequence(toys.split(toys.LLAMA3), toys.BYTE_LEVEL))
    bos = len(document["model"]["vocab"]) + 1
    for pre, stated, expected in (("llama-bpe", None, True), ("llama-bpe", False, False), ("smaug-bpe", None, False),
                                  ("smaug-bpe", True, True)):  # fmt: skip
        ggml = metadata(document, "gpt2", pre, add_bos=stated, special={"bos": bos})
        first = library(document_of(ggml, "x")).encode("hello").ids[0]
        assert (first == bos) is expected
    ggml = metadata(document, "gpt2", "smaug-bpe", add_eos=True, special={"eos": bos})
    assert library(document_of(ggml, "x")).encode("hello").ids[-1] == bos
    with pytest.raises(FormatError, match="add_bos_token is true, but bos_token_id names no token"):
        document_of(metadata(document, "gpt2", "llama-bpe"), "x")


def test_fillers_are_holes() -> None:
    document = toys.byte_level(toys.GPT2_BYTE_LEVEL)
    ggml = metadata(document, "gpt2", "gpt-2")
    padded = replace(ggml, tokens=[*ggml.tokens, "[PAD603]"], types=[*ggml.types, UNUSED])
    assert document_of(padded, "x")["model"]["vocab"] == document_of(ggml, "x")["model"]["vocab"]


def test_refusals() -> None:
    ggml = metadata(toys.byte_level(toys.GPT2_BYTE_LEVEL), "gpt2", "gpt-2")
    with pytest.raises(UnsupportedError, match=r'tokenizer.ggml.model "wordpiece" is not supported'):
        document_of(replace(ggml, model="wordpiece"), "x")
    with pytest.raises(UnsupportedError, match=r'tokenizer.ggml.pre is "new\\x1b", known are llama-bpe'):
        document_of(replace(ggml, pre="new\x1b"), "x")
    with pytest.raises(UnsupportedError, match=r"tokenizer.ggml.pre is not stated"):
        document_of(replace(ggml, pre=None), "x")
    with pytest.raises(FormatError, match="1 token types for 603 tokens"):
        document_of(replace(ggml, types=[1]), "x")
    with pytest.raises(FormatError, match='tokens 7 and 8 are both "'):
        document_of(replace(ggml, tokens=[*ggml.tokens[:8], ggml.tokens[7], *ggml.tokens[9:]]), "x")
    with pytest.raises(FormatError, match="0 scores for 603 tokens"):
        document_of(replace(ggml, model="llama"), "x")


# ---------------------------------------------------------------------------------------------------------------------
# SentencePiece


def sentencepiece_metadata(pieces: dict[str, float], **more: Any) -> GgmlTokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + list(pieces.values())
    special = {"unknown": 0, "bos": 1, "eos": 2}
    return GgmlTokenizer("llama", tokens, types, scores=scores, special=special, **more)


def test_merges_of_scores_by_hand() -> None:
    """The best score first; the ways to one piece by the ids of their halves, or the longest left half first."""
    pieces = {"a": -9.0, "b": -9.0, "c": -9.0, "bc": -2.0, "ab": -1.0, "abc": -3.0}
    rules = [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]
    document = document_of(sentencepiece_metadata(pieces), "x")
    assert document["model"]["merges"] == rules
    document = document_of(sentencepiece_metadata(pieces, add_space_prefix=False), "x")
    assert document["model"]["merges"] == [*rules[:2], rules[3], rules[2]]


def greedy(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE: merge the neighbours with the best score, the leftmost among equals, until none can be."""
    pieces = list(text)
    while True:
        candidates = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not candidates:
            return pieces
        _, i = min(candidates)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_encodes_as_sentencepiece_does() -> None:
    rng = random.Random(0)
    letters = "abcd▁"
    words = list(dict.fromkeys("".join(rng.choices(letters, k=rng.randint(2, 5))) for _ in range(60)))
    prefixes = dict.fromkeys([w[:n] for w in words for n in range(1, 6)] + list(letters))
    pieces = {p: -float(i) for i, p in enumerate(sorted(prefixes, key=lambda p: (-len(p), rng.random())))}
    tokenizer = library(document_of(sentencepiece_metadata(pieces), "x"))
    for _ in range(300):
        text = "".join(rng.choices("abcd ", k=12))
        got = tokenizer.encode(text).tokens
        assert got == ["<s>", *greedy("▁" + text.replace(" ", "▁"), pieces)], text


def test_sentencepiece_both_ways(toy: Toy) -> None:
    source = toys.sentencepiece(toys.normalizers(toys.PREPEND, toys.SPACES))
    # All ways to make each piece, as conversions from SentencePiece list them.
    vocab = source["model"]["vocab"]
    order = {p: i for i, p in enumerate(vocab)}
    rules = [(order[p], vocab[p[:k]], vocab[p[k:]], p[:k], p[k:])
             for p in vocab for k in range(1, len(p)) if p[:k] in vocab and p[k:] in vocab and len(p) < 40
             and vocab[p] > 258]  # fmt: skip
    source["model"]["merges"] = [[a, b] for *_, a, b in sorted(rules)]
    tokenizer = library(source)
    exported = ggml_of(tokenizer, len(vocab), {"unknown": 0, "bos": 1, "eos": 2})
    ggml = exported.ggml
    assert (ggml.model, ggml.add_space_prefix, ggml.add_bos, exported.remarks) == ("llama", True, True, ())
    assert list(ggml.types[:4]) == [UNKNOWN, CONTROL, CONTROL, BYTE]
    rebuilt = document_of(replace(ggml, hugging_face=None), "x")
    assert [list(m) for m in rebuilt["model"]["merges"]] == source["model"]["merges"]
    assert ids(library(rebuilt)) == ids(tokenizer)


def test_blanks_are_pieces_and_not_added_tokens() -> None:
    """Gemma's files hold runs of blanks as user-defined tokens, written with spaces."""
    ggml = sentencepiece_metadata({"▁": -5.0, "a": -5.0}, add_space_prefix=False, add_bos=False)
    ggml = replace(ggml, tokens=[*ggml.tokens, "  ", "\n\n"], types=[*ggml.types, USER_DEFINED, USER_DEFINED],
                   scores=[*ggml.scores, -1.0, -1.0])  # fmt: skip
    document = document_of(ggml, "x")
    assert [t["content"] for t in document["added_tokens"]] == ["<unk>", "<s>", "</s>", "\n\n"]
    assert library(document).encode("a  a\n\na").tokens == ["a", "▁▁", "a", "\n\n", "a"]


def test_blanks_after_the_tokens_of_phi_3() -> None:
    ggml = sentencepiece_metadata({"▁": -5.0, "a": -5.0, "▁a": -1.0}, swallows_blanks=True)
    ggml = replace(ggml, tokens=[*ggml.tokens, "<|end|>"], types=[*ggml.types, CONTROL], scores=[*ggml.scores, 0.0])
    tokens = {t["content"]: t["rstrip"] for t in document_of(ggml, "x")["added_tokens"]}
    assert tokens == {"<unk>": False, "<s>": False, "</s>": True, "<|end|>": True}


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.huggingface.json, and what llama.cpp has no words for


@pytest.mark.parametrize(
    "document",
    [
        toys.byte_level(toys.sequence(toys.split(toys.QWEN2), toys.BYTE_LEVEL), toys.NFC),
        toys.byte_level(toys.sequence(toys.DIGITS, toys.split(toys.LLAMA3), toys.BYTE_LEVEL)),
        toys.sentencepiece(toys.normalizers(toys.PREPEND, toys.SPACES)),
        toys.sentencepiece(None, toys.metaspace("first")),
    ],
    ids=["qwen2", "digits-llama3", "llama2", "mistral"],
)
def test_a_mlt_comes_back_byte_for_byte(document: Json) -> None:
    from krafla_cli.tokenizer.build import build_tokenizer

    config = {"eos_token": document["added_tokens"][2]["content"]}
    first = convert_source(source_of(document, config, "a")).mlt
    tokenizer = build_tokenizer(first)
    special = {"eos": first.eos, "bos": first.bos}
    ggml = ggml_of(tokenizer, len(first.tokens) + 5, {k: i for k, i in special.items() if i >= 0}).ggml
    second = convert_source(source_of(document_of(ggml, "b"), dict(ggml.config()), "b"), len(first.tokens) + 5).mlt
    assert mlt.to_bytes(second) == mlt.to_bytes(first)


def test_splittings_that_llama_cpp_lacks() -> None:
    document = toys.byte_level(toys.sequence(toys.DIGITS, toys.split(toys.LLAMA3), toys.BYTE_LEVEL))
    tokenizer = library(document)
    exported = ggml_of(tokenizer, tokenizer.get_vocab_size(), {})
    assert exported.ggml.model == "no_vocab"
    assert exported.remarks == (
        "llama.cpp splits no text as this tokenizer does: only tokenizer.huggingface.json holds it",
    )
    assert ids(library(document_of(exported.ggml, "x"))) == ids(tokenizer)


def test_remarks() -> None:
    nfc = library(toys.byte_level(toys.GPT2_BYTE_LEVEL, toys.NFC))
    assert ggml_of(nfc, 700, {}).remarks == ("llama.cpp does not normalize text to NFC, as this tokenizer does",)
    first = ggml_of(library(toys.sentencepiece(None, toys.metaspace("first"))), 2000, {})
    assert first.ggml.add_space_prefix is True
    assert "llama.cpp puts ▁ after each special token too" in first.remarks[0]
    unigram = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    with pytest.raises(UnsupportedError, match="WordLevel, not BPE"):
        ggml_of(library(unigram), 3, {})


def test_the_two_vocabularies_must_agree() -> None:
    tokenizer = library(toys.byte_level(toys.GPT2_BYTE_LEVEL))
    ggml = ggml_of(tokenizer, tokenizer.get_vocab_size(), {}).ggml
    swapped = replace(ggml, tokens=[ggml.tokens[1], ggml.tokens[0], *ggml.tokens[2:]])
    with pytest.raises(FormatError, match=r'tokenizer.huggingface.json: token 0 is ".", tokenizer.ggml.tokens has "."'):
        document_of(swapped, "x")
    for broken in ("", "[]", '{"model": 3}', "[" * 10**5):
        with pytest.raises(FormatError, match=r"is no tokenizer.json with a vocabulary"):
            document_of(replace(ggml, hugging_face=broken), "x")


def test_flags_of_the_mlt() -> None:
    document = toys.byte_level(toys.sequence(toys.split(toys.QWEN2), toys.BYTE_LEVEL), toys.NFC)
    ggml = metadata(document, "gpt2", "qwen2")
    assert convert_source(source_of(document_of(ggml, "x"), {}, "x")).mlt.flags == Flag.NFC | Flag.SINGLE_DIGITS
