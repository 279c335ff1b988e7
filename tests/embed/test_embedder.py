"""Texts to embeddings: tokenization as section 5.2 says, batches, threads, widths, and empty or odd texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertTokenizer

from krafla_cli import open_embedder
from krafla_cli.embed.embedder import Embedder, batches_of
from krafla_cli.embed.wordpiece import TextEncoder
from krafla_cli.errors import DataError, FileError, InputError
from krafla_cli.formats import lemb
from krafla_cli.formats.lemb_layout import FLAG_LOWER_CASE, FLAG_STRIP_ACCENTS
from tests.embed.literal import LiteralModel
from tests.embed.students import SPECIAL, TOKENIZER, header_of, random_model

PIECES = (
    *SPECIAL, "kanto", "kantō", "Kanto", "Kantō", "hello", "world", "un", "##aff", "##able", "a", "i", "I", "İ", "ı",
    "東", "京", ",", ".", "[", "]", "SEP", "sep", "##s", "é", "e", "##́", "1", "##2",
)  # fmt: skip


def model_of(flags: int = 0, tokenizer: Any = TOKENIZER, **changes: Any) -> lemb.LembModel:
    header = header_of("int4", "ternary", 1, vocab_size=len(PIECES), flags=flags, **changes)
    return replace(random_model(header, 11), vocab=PIECES, tokenizer=tokenizer)


def pieces(text: str, flags: int = 0, **tokenizer: Any) -> list[str]:
    encoder = TextEncoder(model_of(flags, replace(TOKENIZER, **tokenizer), max_seq_len=64))
    return [PIECES[i] for i in encoder.ids([text]).of(0)]


# --- WordPiece


def test_wrapped_and_longest_match_first() -> None:
    assert pieces("unaffable hello") == ["[CLS]", "un", "##aff", "##able", "hello", "[SEP]"]
    assert pieces("unaffables") == ["[CLS]", "un", "##aff", "##able", "##s", "[SEP]"]
    assert pieces("unx") == ["[CLS]", "[UNK]", "[SEP]"]


def test_one_letter_words_are_not_unknown() -> None:
    assert pieces("a") == ["[CLS]", "a", "[SEP]"]


def test_special_tokens_in_a_text_are_text() -> None:
    assert pieces("[SEP]") == ["[CLS]", "[", "SEP", "]", "[SEP]"]


def test_punctuation_and_cjk_are_words() -> None:
    assert pieces("hello,world.東京") == ["[CLS]", "hello", ",", "world", ".", "東", "京", "[SEP]"]


def test_text_is_cleaned() -> None:
    assert pieces("hel\u0000lo\tworld\u00a0a\u200b") == pieces("hello world a")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (0, "Kantō"),
        (FLAG_LOWER_CASE, "kantō"),
        (FLAG_STRIP_ACCENTS, "Kanto"),
        (FLAG_LOWER_CASE | FLAG_STRIP_ACCENTS, "kanto"),
    ],
)
def test_flags(flags: int, expected: str) -> None:
    assert pieces("Kantō", flags) == ["[CLS]", expected, "[SEP]"]


def test_lower_casing_of_turkish_letters_is_the_plain_one() -> None:
    """Section 3's caveat: İ becomes i and a combining dot, which is why the flag must be off for Turkish."""
    assert pieces("I ı", FLAG_LOWER_CASE)[1] == "i"
    assert pieces("İ", 0)[1] == "İ"
    assert pieces("İ", FLAG_LOWER_CASE)[1] == "[UNK]"


def test_the_limit_counts_characters_not_bytes() -> None:
    assert pieces("é" * 3, max_input_chars_per_word=3)[1] == "[UNK]"  # no piece ##é
    assert pieces("Kantō", max_input_chars_per_word=5)[1] == "Kantō"  # six bytes, five characters
    assert pieces("Kantō", max_input_chars_per_word=4)[1] == "[UNK]"


def test_other_prefixes() -> None:
    assert pieces("hellohello", prefix="") == ["[CLS]", "hello", "hello", "[SEP]"]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_cut_after_wrapping(n: int) -> None:
    """Decision: [CLS] pieces [SEP], then the first max_seq_len; the final [SEP] may fall off."""
    encoder = TextEncoder(model_of(max_seq_len=n))
    assert encoder.ids(["hello world"]).of(0) == [2, PIECES.index("hello"), PIECES.index("world"), 3][:n]
    assert encoder.ids([""]).of(0) == [2, 3][:n]


@pytest.mark.parametrize("flags", [0, FLAG_LOWER_CASE, FLAG_LOWER_CASE | FLAG_STRIP_ACCENTS])
def test_ids_are_transformers(flags: int) -> None:
    oracle = BertTokenizer(
        vocab={token: i for i, token in enumerate(PIECES)},
        do_lower_case=bool(flags & FLAG_LOWER_CASE),
        strip_accents=bool(flags & FLAG_STRIP_ACCENTS),
    )
    encoder = TextEncoder(model_of(flags, max_seq_len=64))
    texts = [
        "",
        " ",
        "Hello, WORLD.",
        "Kantō é e\u0301 I i İ ı",
        "東京 12 [x]",
        "un aff unaffable",
        "\u2028a\u0085a",
        "a" * 101,
    ]
    for text in texts:
        assert encoder.ids([text]).of(0) == oracle(text)["input_ids"], text


WORDS = st.text(st.sampled_from("abuns İIé\u0301東.[]\t\x1c\u00a0\u2003\u200b\x00SEP"), max_size=12)


@pytest.mark.parametrize("flags", [0, FLAG_LOWER_CASE | FLAG_STRIP_ACCENTS])
def test_a_text_has_the_ids_of_its_words(flags: int) -> None:
    """The library on the whole text gives what it gives word by word, whatever the white space and the marks."""
    encoder = TextEncoder(model_of(flags, max_seq_len=9))

    @given(st.lists(WORDS, min_size=1, max_size=5))
    @settings(deadline=None, max_examples=200, derandomize=True, database=None)
    def check(texts: list[str]) -> None:
        whole = [[2, *encoder.library.encode(t, add_special_tokens=False).ids, 3][:9] for t in texts]
        tokens = encoder.ids(texts)
        assert [tokens.of(i) for i in range(len(texts))] == whole

    check()


def test_words_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("krafla_cli.embed.wordpiece.MAX_KNOWN_CHARS", 10)
    encoder = TextEncoder(model_of())
    for text in ("hello world", "a b c d e f", "hello"):
        assert encoder.ids([text]).of(0) == TextEncoder(model_of()).ids([text]).of(0)
    assert list(encoder._known.numbers) == ["hello"]


# --- embeddings


def test_against_the_literal_transcription() -> None:
    model = model_of(max_seq_len=6)
    embedder = Embedder(model)
    texts = ["hello world", "", "a a a a a a a a", "unknownword", "hello"]
    for dims in (4, 8, 12):
        got = embedder.embed(texts, dims)
        assert got.shape == (5, dims)
        assert got.dtype == np.float32
        assert np.allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)
        literal = [LiteralModel(model).embed(embedder.text_encoder.ids([t]).of(0), dims) for t in texts]
        assert np.abs(got - np.stack(literal)).max() <= 1e-5


def test_padding_ids_shorten_a_text_as_section_6_counts() -> None:
    """n_active counts ids that are not padding and takes the first so many, wherever the padding is."""
    tokenizer = replace(TOKENIZER, pad_token_id=PIECES.index("a"))
    model = model_of(tokenizer=tokenizer)
    embedder = Embedder(model)
    ids = embedder.text_encoder.ids(["a hello a world"]).of(0)
    assert embedder.text_encoder.active_ids(["a hello a world"]).of(0) == ids[:4]
    literal = LiteralModel(model).embed(ids, 12)
    assert np.abs(embedder.embed(["a hello a world"])[0] - literal).max() <= 1e-5


def test_a_text_of_padding_only_is_an_error() -> None:
    tokenizer = replace(TOKENIZER, pad_token_id=2, sep_token_id=2)
    with pytest.raises(DataError, match="text 12 has no tokens other than padding"):
        Embedder(model_of(tokenizer=tokenizer)).embed(["a", ""], first_number=11)


def test_dims_that_the_model_does_not_have() -> None:
    embedder = Embedder(model_of())
    for dims in (0, -1, 5, 13, 384):
        with pytest.raises(InputError, match=rf"dims {dims} is not one of this model's: 4, 8, 12"):
            embedder.embed(["a"], dims)
    assert embedder.embed(["a"], 12).shape == (1, 12)


def test_no_texts() -> None:
    assert Embedder(model_of()).embed([], 8).shape == (0, 8)


def test_order_and_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("krafla_cli.embed.embedder.BATCH_TOKENS", 20)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["hello", "world", "a", "unaffable"], n)) for n in rng.integers(0, 12, 60)]
    one = Embedder(model_of()).embed(texts)
    assert np.array_equal(Embedder(model_of(), threads=3).embed(texts), one)
    assert np.array_equal(Embedder(model_of()).embed(texts[::-1])[::-1], one)
    assert np.array_equal(np.concatenate([Embedder(model_of()).embed([t]) for t in texts]), one)


def test_half_a_surrogate_pair_is_named() -> None:
    with pytest.raises(InputError, match=r"text 2: \\u\{d800\} at character 0 is no character"):
        Embedder(model_of()).embed(["a", "\ud800"])


def test_embeddings_that_are_not_finite_are_an_error() -> None:
    model = random_model(header_of(n_layers=0))
    huge = np.sign(model.arrays["projection.weight"]) * np.float32(3e38)
    arrays = dict(model.arrays) | {"projection.weight": huge, "final_ln.weight": np.full(16, 1e3, np.float32)}
    with pytest.raises(DataError, match="text 1: its embedding is not finite"):
        Embedder(replace(model, arrays=arrays)).embed(["cat"])


def test_a_projection_of_zeros_gives_zeros() -> None:
    model = random_model(header_of(n_layers=0))
    zeros = {n: np.zeros_like(model.arrays[n]) for n in ("projection.weight", "projection.bias")}
    assert not Embedder(replace(model, arrays={**model.arrays, **zeros})).embed(["cat"]).any()


def test_batches() -> None:
    lengths = [1, 1, 4, 5, 9, 9]
    assert batches_of(np.array([0, *np.cumsum(lengths)]), 6) == [(0, 3), (3, 4), (4, 5), (5, 6)]
    assert batches_of(np.array([0, *np.cumsum(lengths)]), 100) == [(0, 6)]
    assert batches_of(np.array([0]), 6) == []


def test_open_embedder(tmp_path: Any) -> None:
    lemb.write(tmp_path / "m.bin", model_of())
    assert np.array_equal(open_embedder(tmp_path / "m.bin").embed(["a"]), Embedder(model_of()).embed(["a"]))
    with pytest.raises(FileError):
        open_embedder(tmp_path / "none.bin")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n_chunks", [0, 1, 2, 5])
def test_chunks_are_the_whole_in_order(threads: int, n_chunks: int) -> None:
    """Tokenized ahead or not: every chunk comes with its rows, and a fault has the text's number in all of them."""
    embedder = Embedder(model_of(), threads)
    texts = [["hello", "a" * i, "world"][: 1 + i % 3] for i in range(n_chunks)]
    got = list(embedder.embed_chunks(iter(texts), 8))
    assert [chunk for chunk, _ in got] == texts
    assert all(np.array_equal(rows, embedder.embed(chunk, 8)) for chunk, rows in got)
    padded = Embedder(model_of(tokenizer=replace(TOKENIZER, pad_token_id=2, sep_token_id=2)), threads)
    number = 10 + sum(map(len, texts)) + 1
    with pytest.raises(DataError, match=f"text {number} has no tokens"):
        list(padded.embed_chunks([*([["a"] * len(t) for t in texts]), ["a", ""]], first_number=10))
