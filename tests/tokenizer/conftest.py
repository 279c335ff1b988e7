"""Tokenizers that several tests use, trained once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.tokenizer import toys

Json = dict[str, Any]


@pytest.fixture(scope="session")
def _made() -> dict[str, Json]:
    return {}


@pytest.fixture
def toy(_made: dict[str, Json]) -> Callable[[str], Json]:
    """A fresh copy of one of ``PIPELINES`` by name."""

    def make(name: str) -> Json:
        if name not in _made:
            _made[name] = PIPELINES[name]()
        return copy.deepcopy(_made[name])

    return make


def _smollm2() -> Json:
    return toys.byte_level(toys.sequence(toys.DIGITS, toys.GPT2_BYTE_LEVEL))


def _llama3() -> Json:
    document = toys.byte_level(
        toys.sequence(toys.split(toys.LLAMA3), toys.BYTE_LEVEL),
        added_tokens=["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    )
    bos = document["added_tokens"][0]["id"]
    document["model"]["ignore_merges"] = True
    document["post_processor"] = {
        "type": "Sequence",
        "processors": [
            toys.GPT2_BYTE_LEVEL,
            toys.template("<|begin_of_text|>", ids={"<|begin_of_text|>": bos}),
        ],
    }
    return document


def _qwen3() -> Json:
    pieces = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "<|fim_prefix|>"]
    document = toys.byte_level(toys.sequence(toys.split(toys.QWEN2), toys.BYTE_LEVEL), toys.NFC, pieces)
    for token in document["added_tokens"][3:]:
        token["special"] = False
    return document


PIPELINES: dict[str, Callable[[], Json]] = {
    "gpt2": lambda: toys.byte_level(toys.GPT2_BYTE_LEVEL),
    "smollm2": _smollm2,
    "llama3": _llama3,
    "qwen3": _qwen3,
    "llama2": lambda: toys.sentencepiece(toys.normalizers(toys.PREPEND, toys.SPACES)),
    "mistral3": lambda: toys.sentencepiece(None, toys.metaspace("first")),
    "qwen3.5": lambda: toys.byte_level(toys.sequence(toys.split(toys.QWEN35), toys.BYTE_LEVEL), toys.NFC),
    "gemma": lambda: toys.sentencepiece(dict(toys.SPACES)),
}
