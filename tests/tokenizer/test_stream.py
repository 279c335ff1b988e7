"""Streaming: whole characters, U+FFFD only when nothing can save the bytes, stop texts never half shown."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from krafla_cli.errors import UnsupportedError
from krafla_cli.formats.mlt import Flag, Kind, Mlt, Token
from krafla_cli.formats.text import terminal_text
from krafla_cli.tokenizer import StopText, StreamDecoder, load_tokenizer
from krafla_cli.tokenizer.build import build_tokenizer
from krafla_cli.tokenizer.corpus import SENTENCES, mixtures
from krafla_cli.tokenizer.stream import decode
from tests.tokenizer import toys

Toy = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def by_byte() -> Tokenizer:
    """Byte-level, one token a byte: id = byte. 256: "<|end|>"."""
    tokens = (*(Token(0, bytes([b])) for b in range(256)), Token(1, b"<|end|>"))
    return build_tokenizer(Mlt(Kind.BYTE_LEVEL, Flag(0), -1, -1, tokens, np.zeros((0, 3), np.uint32)))


def pushed(tokenizer: Tokenizer, ids: bytes | list[int], **options: bool) -> list[str]:
    stream = StreamDecoder(tokenizer, **options)
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("é".encode(), ["", "é", ""]),
        ("👍!".encode(), ["", "", "", "👍", "!", ""]),
        (b"\x80", ["\ufffd", ""]),  # no character starts so
        (b"a\xf0\x9f\x91", ["a", "", "", "", "\ufffd"]),  # the text ends inside a character
        (b"\xf0\x9fA", ["", "", "\ufffdA", ""]),
        (b"\xc0\xaf", ["\ufffd", "\ufffd", ""]),  # an overlong form is invalid from its first byte
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd", ""]),  # a surrogate is no character
        (b"\xf4\x90", ["", "\ufffd\ufffd", ""]),  # above U+10FFFF
        (b"\xe2\x82\xe2\x82\xac", ["", "", "\ufffd", "", "€", ""]),
        (b"! ! !", ["!", " ", "!", " ", "!", ""]),
    ],
)
def test_whole_characters_only(by_byte: Tokenizer, data: bytes, expected: list[str]) -> None:
    assert pushed(by_byte, data) == expected


@settings(derandomize=True, deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_decode_as_python_decodes_them(by_byte: Tokenizer, data: bytes) -> None:
    assert "".join(pushed(by_byte, data)) == data.decode("utf-8", errors="replace")


def test_an_added_token_ends_an_unfinished_character(by_byte: Tokenizer) -> None:
    assert pushed(by_byte, [0xE2, 256, 65]) == ["", "\ufffd<|end|>", "A", ""]
    assert pushed(by_byte, [65, 256, 66], skip_special_tokens=True) == ["A", "", "B", ""]


def test_unknown_ids_add_nothing(by_byte: Tokenizer) -> None:
    assert pushed(by_byte, [65, 5000, 66]) == ["A", "", "B", ""]


def test_flush_makes_the_decoder_fresh(by_byte: Tokenizer) -> None:
    stream = StreamDecoder(by_byte)
    assert [stream.push(0xE2), stream.flush(), stream.push(0x41), stream.flush()] == ["", "\ufffd", "A", ""]


@pytest.mark.parametrize("name", ["gpt2", "smollm2", "llama3", "qwen3", "llama2", "mistral3", "qwen3.5", "gemma"])
def test_pieces_joined_are_the_decoded_text(tmp_path: Path, toy: Toy, name: str) -> None:
    """For tokenizer.json files too, also those that .mlt cannot express."""
    tokenizer = load_tokenizer(toys.write(tmp_path, toy(name)))
    for line in [*SENTENCES, *mixtures(100, random.Random(5), ["<s>", "<|im_end|>"]), "! ! ! \u2029 ! ."]:
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        assert (
            "".join(pushed(tokenizer, ids))
            == tokenizer.decode(ids, skip_special_tokens=False)
            == decode(tokenizer, ids)
        )


def test_the_space_prefix_of_sentencepiece(tmp_path: Path, toy: Toy) -> None:
    tokenizer = load_tokenizer(toys.write(tmp_path, toy("llama2")))
    ids = tokenizer.encode("hello", add_special_tokens=False).ids
    assert "".join(pushed(tokenizer, ids)) == "hello"
    assert "".join(pushed(tokenizer, ids, continuation=True)) == " hello"
    two = tokenizer.encode("  hello", add_special_tokens=False).ids
    assert "".join(pushed(tokenizer, two)) == "  hello"


def test_byte_fallback_is_joined_to_characters(tmp_path: Path, toy: Toy) -> None:
    tokenizer = load_tokenizer(toys.write(tmp_path, toy("llama2")))
    ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "🦖".encode()]
    assert pushed(tokenizer, ids) == ["", "", "", "🦖", ""]
    # Where the library gives up on the whole run of bytes, only the invalid ones are replaced.
    assert "".join(pushed(tokenizer, [*ids, ids[1]])) == "🦖\ufffd"


def test_a_decoder_that_is_not_understood(by_byte: Tokenizer) -> None:
    other = Tokenizer.from_str(by_byte.to_str())
    other.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match=r"decoder: WordPiece\("):
        StreamDecoder(other)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        (["END"], ["a", "bE", "N", "D", "c"], ["a", "b", "", "", ""], "END"),
        (["END"], ["abENDEND"], ["ab"], "END"),
        (["END"], ["aEN", "Ex"], ["a", "ENEx"], None),
        (["END"], ["aE", "EN", "D"], ["a", "E", ""], "END"),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (["\n\n", "User:"], ["x\nUs", "er", ": y"], ["x\n", "", ""], "User:"),
        (["bc", "abcd"], ["ab", "cd"], ["", "a"], "bc"),
        (["ab", "a"], ["xab"], ["x"], "a"),
        (["bc", "abc"], ["xabc"], ["x"], "abc"),
        ([], ["a", "b"], ["a", "b"], None),
        (["", "Z"], ["a"], ["a"], None),
        (["ß→"], ["ß", "→"], ["", ""], "ß→"),
    ],
)
def test_stop_texts(stops: list[str], pieces: list[str], shown: list[str], found: str | None) -> None:
    stop = StopText(stops)
    assert [stop.push(p) for p in pieces] == shown
    assert stop.found == found


def test_what_was_held_back_comes_at_the_end() -> None:
    stop = StopText(["END"])
    assert [stop.push("aEN"), stop.flush(), stop.flush()] == ["a", "EN", ""]
    stop = StopText(["END"])
    assert [stop.push("aEND"), stop.flush()] == ["a", ""]


@settings(derandomize=True, deadline=None)
@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_text_does_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    stop = StopText(stops)
    shown = "".join(stop.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))
    shown += stop.flush()
    whole = StopText(stops)
    assert (shown, stop.found) == (whole.push(text) + whole.flush(), whole.found)
    assert not any(s in shown for s in stops)
    assert text.startswith(shown + stop.found) if stop.found else shown == text


def test_control_characters_do_not_reach_a_terminal() -> None:
    raw = "a\x1b[2J\r\x00b\x9bc\u202ed\u2028\n\te👩‍🚀é"
    assert terminal_text(raw) == "a\\x1b[2J\\x0d\\x00b\\x9bc\\u{202e}d\\u{2028}\n\te👩‍🚀é"
