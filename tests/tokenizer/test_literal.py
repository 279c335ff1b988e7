"""The tokenizer built through `tokenizers` against a literal reading of the same bytes, on text made by hypothesis."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from krafla_cli.errors import UnsupportedError
from krafla_cli.formats import mlt
from krafla_cli.formats.mlt import Flag, Kind, Mlt, Token
from krafla_cli.tokenizer import load_tokenizer
from krafla_cli.tokenizer.corpus import FRAGMENTS, SENTENCES
from tests.tokenizer.literal import LiteralTokenizer

ADDED = ["<s>", "</s>", "<|im_end|>", "<|im_end|><|x|>", "  \n", "<▁▁", "<é>", "hello world"]
BYTE_FLAGS = [Flag(0), Flag.SINGLE_DIGITS, Flag.GPT2_REGEX, Flag.SPLIT_DIGITS, Flag.GPT2_REGEX | Flag.SPLIT_DIGITS]


def _known(char: str) -> bool:
    """Characters that every Unicode version in use here classes alike, and that the two regex engines agree on."""
    return unicodedata.category(char) not in ("Cn", "Cs") and char not in "\x1c\x1d\x1e\x1f"


CHARS = st.one_of(
    st.sampled_from(sorted({c for s in (*SENTENCES, *FRAGMENTS) for c in s if _known(c)})),
    st.characters(exclude_categories=["Cs", "Cn"]).filter(_known),
)
PARTS = st.one_of(
    CHARS,
    st.sampled_from(ADDED),
    st.sampled_from([f for f in FRAGMENTS if all(map(_known, f))]),
    st.text(CHARS, max_size=8),
)
TEXTS = st.lists(PARTS, max_size=10).map("".join)


def _merges(pieces: dict[bytes, int], rng: random.Random, n: int, words: list[bytes]) -> list[tuple[int, int, int]]:
    """``n`` merges in random order of ranks over what can meet in ``words``; new pieces are added to ``pieces``."""
    merges: list[tuple[int, int, int]] = []
    seen: set[tuple[bytes, bytes]] = set()
    while len(merges) < n:
        word = rng.choice(words)
        cuts = sorted(rng.sample(range(len(word) + 1), 3)) if len(word) > 2 else [0, 1, len(word)]
        left, right = word[cuts[0] : cuts[1]], word[cuts[1] : cuts[2]]
        if not left or not right or (left, right) in seen or left not in pieces or right not in pieces:
            continue
        seen.add((left, right))
        merged = pieces.setdefault(left + right, len(pieces))
        merges.append((pieces[left], pieces[right], merged))
    return merges


def byte_level(flags: Flag, rng: random.Random) -> Mlt:
    pieces = {bytes([b]): b for b in range(256)}
    words = [f" {w}".encode() for s in SENTENCES for w in (s, unicodedata.normalize("NFC", s))]
    merges = _merges(pieces, rng, 400, [w[i : i + 9] for w in words for i in range(0, len(w), 4)])
    tokens = [Token(0, p) for p in pieces] + [Token(0, b"")] + [Token(1, a.encode()) for a in ADDED]
    rng.shuffle(merges)
    return Mlt(Kind.BYTE_LEVEL, flags, len(pieces) + 1, -1, tuple(tokens), np.array(merges, np.uint32))


def sentencepiece(flags: Flag, rng: random.Random) -> Mlt:
    chars = [*sorted({c for s in SENTENCES for c in s.replace(" ", "▁")})[::2], "▁", "h", "e", "l", "o"]
    pieces = {c.encode(): i for i, c in enumerate(dict.fromkeys(chars))}
    texts = [f"▁{s}".replace(" ", "▁") for s in SENTENCES] + ["▁hello▁▁hello"] * 9
    words = [t[i : i + 5].encode() for t in texts for i in range(0, len(t), 2)]
    merges = _merges(pieces, rng, 300, words)
    tokens = [Token(0, p) for p in pieces] + [Token(2, bytes([b])) for b in range(256)]
    tokens += [Token(0, b""), *(Token(1, a.encode()) for a in ADDED)]
    rng.shuffle(merges)
    return Mlt(Kind.SENTENCEPIECE, flags, len(tokens) - 1, -1, tuple(tokens), np.array(merges, np.uint32))


def pair(folder: Path, made: Mlt) -> tuple[Tokenizer, LiteralTokenizer]:
    path = folder / "t.mlt"
    path.write_bytes(mlt.to_bytes(made))
    return load_tokenizer(path), LiteralTokenizer(path.read_bytes())


CASES: list[tuple[Callable[[Flag, random.Random], Mlt], Flag]] = [
    (byte_level, flags | (extra & ~Flag.ADD_BOS) | (Flag.ADD_BOS if i % 2 else Flag(0)))
    for i, flags in enumerate(BYTE_FLAGS)
    for extra in (Flag(0), Flag.NFC | Flag.IGNORE_MERGES)
]
CASES += [(sentencepiece, Flag(f)) for f in (0, 1, 1 | 2, 4, 1 | 4)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tokenizer, LiteralTokenizer]]:
    folder = tmp_path_factory.mktemp("literal")
    return [pair(folder, make(flags, random.Random(seed))) for seed, (make, flags) in enumerate(CASES)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=TEXTS)
def test_agrees_with_the_literal_reading(pairs: list[tuple[Tokenizer, LiteralTokenizer]], text: str) -> None:
    for (built, literal), case in zip(pairs, CASES, strict=True):
        assert built.encode(text).ids == literal.encode(text), case


def test_agrees_on_written_text(pairs: list[tuple[Tokenizer, LiteralTokenizer]]) -> None:
    for (built, literal), case in zip(pairs, CASES, strict=True):
        for text in (*SENTENCES, " hello", "hello", "hello<s> hello</s>hello", "<s>hello", "e\u0301<s>\u0301", "  \n"):
            assert built.encode(text).ids == literal.encode(text), (case, text)


def test_ranks_and_ties_of_the_literal_reading_by_hand(tmp_path: Path) -> None:
    """ "aaab": with (a,a) first, the leftmost pair merges; with (a,b) first, the end merges before it."""
    letters: Any = tuple(Token(0, bytes([b])) for b in range(256))
    extra = (Token(0, b"aa"), Token(0, b"ab"), Token(0, b"aab"))
    a, b = ord("a"), ord("b")
    for merges, expected in (([(a, a, 256), (a, b, 257)], [256, 257]), ([(a, b, 257), (a, a, 256)], [256, 257])):
        built, literal = pair(
            tmp_path, Mlt(Kind.BYTE_LEVEL, Flag(0), -1, -1, letters + extra, np.array(merges, np.uint32))
        )
        assert built.encode("aaab").ids == literal.encode("aaab") == expected
    merges = [(a, a, 256), (256, b, 258), (a, b, 257)]
    built, literal = pair(tmp_path, Mlt(Kind.BYTE_LEVEL, Flag(0), -1, -1, letters + extra, np.array(merges, np.uint32)))
    assert built.encode("aaab").ids == literal.encode("aaab") == [256, 257]
    assert built.encode("aab").ids == literal.encode("aab") == [258]


def test_flags_that_the_library_does_not_encode_exactly(tmp_path: Path) -> None:
    """With flags 2 and 4, "<s><0x41>" would become the byte token of "A", which the bytes of the file do not say."""
    with pytest.raises(UnsupportedError, match=r"t\.mlt: flags 2 and 4 together are not encoded exactly here"):
        pair(tmp_path, sentencepiece(Flag.IGNORE_MERGES | Flag.PREFIX_FIRST_ONLY, random.Random(0)))
