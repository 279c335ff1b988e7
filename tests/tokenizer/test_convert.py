"""tokenizer.json -> .mlt: every flag from the pipeline that means it, equality with the library, refusals by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from krafla_cli.errors import FileError, FormatError, ShapeError, UnsupportedError
from krafla_cli.formats import mlt
from krafla_cli.formats.mlt import Flag, Kind, Token
from krafla_cli.progress import Progress
from krafla_cli.tokenizer import convert_tokenizer, convert_with_proof, load_tokenizer
from krafla_cli.tokenizer.corpus import SENTENCES, mixtures
from tests.tokenizer import toys

Json = dict[str, Any]
Toy = Callable[[str], Json]
F = Flag
LINES = [*SENTENCES, *mixtures(300, random.Random(11), ["<|im_start|>", "<|im_end|>", "<s>", "<think>", "<|eot_id|>"])]


def convert(folder: Path, document: Json, config: Json | None = None) -> mlt.Mlt:
    return convert_tokenizer(toys.write(folder, document, config))


def refusal(folder: Path, document: Json) -> str:
    with pytest.raises(UnsupportedError) as error:
        convert(folder, document)
    return str(error.value).replace(str(folder), "F")


@pytest.mark.parametrize(
    ("name", "kind", "flags"),
    [
        ("gpt2", Kind.BYTE_LEVEL, F.GPT2_REGEX),
        ("smollm2", Kind.BYTE_LEVEL, F.GPT2_REGEX | F.SPLIT_DIGITS),
        ("llama3", Kind.BYTE_LEVEL, F.ADD_BOS | F.IGNORE_MERGES),
        ("qwen3", Kind.BYTE_LEVEL, F.NFC | F.SINGLE_DIGITS),
        ("llama2", Kind.SENTENCEPIECE, F.ADD_BOS),
        ("mistral3", Kind.SENTENCEPIECE, F.ADD_BOS | F.PREFIX_FIRST_ONLY),
    ],
)
def test_pipelines_convert_exactly(tmp_path: Path, toy: Toy, name: str, kind: Kind, flags: Flag) -> None:
    folder = toys.write(tmp_path / "src", toy(name))
    conversion = convert_with_proof(folder)
    assert (conversion.mlt.kind, conversion.mlt.flags) == (kind, flags)
    assert conversion.n_lines >= 2000
    path = tmp_path / "t.mlt"
    path.write_bytes(mlt.to_bytes(conversion.mlt))
    assert mlt.validate(path).faults == []
    built, source = load_tokenizer(path), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for line in LINES:
        ids = source.encode(line).ids
        assert built.encode(line).ids == ids, line
        assert built.encode(line, add_special_tokens=False).ids == source.encode(line, add_special_tokens=False).ids
        assert built.decode(ids, skip_special_tokens=False) == source.decode(ids, skip_special_tokens=False)


def test_a_whole_word_is_one_token_only_with_ignore_merges(tmp_path: Path, toy: Toy) -> None:
    document = toy("llama3")
    document["model"]["vocab"]["qzqzqz"] = len(document["model"]["vocab"])  # no merge leads to it
    document |= {"added_tokens": [], "post_processor": None}
    whole = load(tmp_path, convert(tmp_path / "a", document))
    assert whole.encode("qzqzqz").tokens == ["qzqzqz"]
    document["model"]["ignore_merges"] = False
    assert len(load(tmp_path, convert(tmp_path / "b", document)).encode("qzqzqz").ids) > 1


def load(folder: Path, converted: mlt.Mlt) -> Tokenizer:
    path = folder / "loaded.mlt"
    path.write_bytes(mlt.to_bytes(converted))
    return load_tokenizer(path)


def test_prefix_rules(tmp_path: Path, toy: Toy) -> None:
    llama2, mistral3 = (load(tmp_path, convert(tmp_path / n, toy(n))) for n in ("llama2", "mistral3"))
    for text in ("hello", " hello", "  hello", "hello</s>hello", "</s> hello"):
        for tokenizer, name in ((llama2, "llama2"), (mistral3, "mistral3")):
            source = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
            assert tokenizer.encode(text).tokens == source.encode(text).tokens
    assert llama2.encode(" hello", add_special_tokens=False).ids != llama2.encode("hello", add_special_tokens=False).ids
    # Metaspace adds no prefix where the text starts with a space already, nor after an added token.
    assert mistral3.encode(" hello").ids == mistral3.encode("hello").ids
    after = {t: t.encode("</s>q", add_special_tokens=False).tokens[1:] for t in (mistral3,)}
    assert after[mistral3] == ["q"]
    assert llama2.encode("</s>q", add_special_tokens=False).tokens[1].startswith("▁")


def test_lowest_rank_merges_first(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    vocab = document["model"]["vocab"]
    pieces = ["br", "ut", "al", "ist", "alist", "is"]
    for piece in pieces:
        vocab.setdefault(piece, len(vocab))
    document["model"]["merges"] = [["a", "l"], ["i", "s"], ["is", "t"], ["u", "t"], ["b", "r"], ["al", "ist"]]
    for i, token in enumerate(document["added_tokens"]):
        token["id"] = len(vocab) + i
    assert load(tmp_path, convert(tmp_path, document)).encode("brutalist").tokens == ["br", "ut", "alist"]


def test_merges_as_strings_and_as_pairs_are_the_same(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    pairs = convert(tmp_path / "pairs", document)
    document["model"]["merges"] = ["#version: 0.2"] + [f"{a} {b}" for a, b in document["model"]["merges"]]
    strings = convert(tmp_path / "strings", document)
    assert mlt.to_bytes(strings) == mlt.to_bytes(pairs)


def test_a_repeated_merge_keeps_the_rank_that_the_library_keeps(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    merges = document["model"]["merges"]
    document["model"]["merges"] = [*merges, merges[0]]
    converted = convert(tmp_path, document)
    assert len(converted.merges) == len(merges)
    vocab = document["model"]["vocab"]
    assert converted.merges[-1, :2].tolist() == [vocab[merges[0][0]], vocab[merges[0][1]]]


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        (toys.LLAMA3.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)").replace("]?", "]?+"), F(0)),
        (toys.QWEN2.replace(r"[^\s\p{L}\p{N}]", r"[^\p{N}\p{L}\s]"), F.SINGLE_DIGITS),
        (toys.GPT2.replace("'s|'t|'re|'ve|'m|'ll|'d", "'(?:[sdmt]|ll|ve|re)"), F.GPT2_REGEX),
    ],
)  # fmt: skip
def test_other_spellings_of_the_patterns(tmp_path: Path, toy: Toy, pattern: str, flags: Flag) -> None:
    document = toy("gpt2")
    for behavior, invert in (("Isolated", False), ("Removed", True)):
        document["pre_tokenizer"] = toys.sequence(toys.split(pattern, behavior, invert), toys.BYTE_LEVEL)
        assert convert(tmp_path / behavior, document).flags == flags


def test_nested_and_empty_sequences_are_their_parts(tmp_path: Path, toy: Toy) -> None:
    document = toy("qwen3")
    document["normalizer"] = toys.normalizers(toys.normalizers(), toys.normalizers(toys.NFC))
    document["pre_tokenizer"] = toys.sequence(toys.sequence(toys.split(toys.QWEN2)), toys.BYTE_LEVEL)
    assert convert(tmp_path, document).flags == F.NFC | F.SINGLE_DIGITS
    document = toy("llama2")
    document["normalizer"] = toys.normalizers(toys.SPACES, toys.PREPEND)
    assert convert(tmp_path, document).flags == F.ADD_BOS


def test_ids_anywhere_with_holes(tmp_path: Path, toy: Toy) -> None:
    """Added tokens in front of the vocabulary and inside of it; ids that nothing has."""
    document = toy("gpt2")
    vocab = {piece: i + 5 + 7 * (i > 300) for piece, i in document["model"]["vocab"].items()}
    names = {"<pad>": 1, "<bos>": 3, "<mid>": 307, "<end>": max(vocab.values()) + 4}
    document["model"]["vocab"] = vocab | names
    document["added_tokens"] = [toys.added(i, name) for name, i in names.items()]
    converted = convert(tmp_path, document, {"bos_token": "<bos>", "eos_token": {"content": "<end>"}})
    assert len(converted.tokens) == names["<end>"] + 1
    assert {i for i, t in enumerate(converted.tokens[:312]) if t == (0, b"")} == {0, 2, 4, 306, 308, 309, 310, 311}
    assert [converted.tokens[i] for i in names.values()] == [Token(1, n.encode()) for n in names]
    assert (converted.bos, converted.eos, converted.flags) == (3, names["<end>"], F.GPT2_REGEX)
    built = load(tmp_path, converted)
    assert (
        built.encode("a<pad>b<end>").ids
        == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a<pad>b<end>").ids
    )


def test_the_longest_added_token_wins(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    first = document["added_tokens"][0]["id"]
    document["added_tokens"] = [toys.added(first + i, t) for i, t in enumerate(["<a>", "<a><b>", "<b>", "a><b><c"])]
    built = load(tmp_path, convert(tmp_path, document))
    assert built.encode("<a><b><c").tokens[0] == "<a><b>"
    assert built.encode("a><b><c<b>").tokens == ["a><b><c", "<b>"]


def test_added_tokens_listed_twice(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    document["added_tokens"].append(document["added_tokens"][0])
    assert len(convert(tmp_path, document).added()) == 3


def test_bos_and_eos_come_from_the_files_beside(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    ids = {t["content"]: t["id"] for t in document["added_tokens"]}
    assert [(m := convert(tmp_path / "none", document)).bos, m.eos] == [-1, -1]
    m = convert(tmp_path / "config", document, {"bos_token": None, "eos_token": "<|im_end|>"})
    assert (m.bos, m.eos) == (-1, ids["<|im_end|>"])
    folder = toys.write(tmp_path / "map", document)
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|endoftext|>"}}')
    assert convert_tokenizer(folder / "tokenizer.json").bos == ids["<|endoftext|>"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma", {}, "normalizer: puts no ▁ before the text (Replace("),
        ("qwen3.5", {}, "pre_tokenizer: Split by "),
        ("gpt2", {"normalizer": {"type": "NFKC"}}, "normalizer: NFKC()"),
        ("gpt2", {"normalizer": {"type": "Lowercase"}}, "normalizer: Lowercase()"),
        ("gpt2", {"pre_tokenizer": {**toys.GPT2_BYTE_LEVEL, "add_prefix_space": True}}, "add_prefix_space=True"),
        ("gpt2", {"pre_tokenizer": toys.sequence(toys.BYTE_LEVEL)}, "pre_tokenizer: ByteLevel("),
        (
            "gpt2",
            {"pre_tokenizer": toys.sequence({"type": "Digits", "individual_digits": False}, toys.GPT2_BYTE_LEVEL)},
            "pre_tokenizer: Digits(individual_digits=False)",
        ),
        (
            "gpt2",
            {"pre_tokenizer": toys.sequence({"type": "Whitespace"}, toys.GPT2_BYTE_LEVEL)},
            "pre_tokenizer: Whitespace() then ByteLevel(",
        ),
        (
            "gpt2",
            {"pre_tokenizer": toys.sequence(toys.split(toys.GPT2, "MergedWithNext"), toys.BYTE_LEVEL)},
            "MergedWithNext",
        ),
        ("mistral3", {"pre_tokenizer": toys.metaspace("always")}, "pre_tokenizer: Metaspace("),
        ("mistral3", {"pre_tokenizer": toys.metaspace("never")}, "prepend_scheme='never'"),
        ("mistral3", {"pre_tokenizer": toys.metaspace("first", True)}, "split=True"),
        ("llama2", {"normalizer": toys.normalizers(toys.PREPEND, toys.SPACES, toys.NFC)}, "normalizer: Prepend("),
        ("llama2", {"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer: Whitespace()"),
        (
            "llama2",
            {"post_processor": toys.template("<s>", after=("</s>",), ids={"<s>": 1, "</s>": 2})},
            "'</s>' after",
        ),
        ("llama2", {"post_processor": toys.template("<s>", "</s>", ids={"<s>": 1, "</s>": 2})}, "adds 2 tokens before"),
        ("llama2", {"post_processor": toys.template("<s>", ids={"<s>": 99999})}, "token 99999, which does not exist"),
        (
            "llama2",
            {"post_processor": {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]}},
            "post_processor: BertProcessing",
        ),
    ],
)
def test_what_mlt_cannot_express_is_refused_by_name(
    tmp_path: Path, toy: Toy, name: str, change: Json, message: str
) -> None:
    assert message in refusal(tmp_path, toy(name) | change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2", {"dropout": 0.1}, "model: dropout=0.1"),
        ("gpt2", {"end_of_word_suffix": "</w>", "merges": []}, "model: end_of_word_suffix='</w>'"),
        ("mistral3", {"ignore_merges": True}, "model: ignore_merges with byte_fallback and a ▁ only at the start"),
        ("llama2", {"byte_fallback": False}, "model: neither byte-level nor with byte_fallback"),
    ],
)
def test_models_that_mlt_cannot_express(tmp_path: Path, toy: Toy, name: str, change: Json, message: str) -> None:
    document = toy(name)
    document["model"] |= change
    assert message in refusal(tmp_path, document)


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_models_other_than_bpe(tmp_path: Path, toy: Toy, kind: str) -> None:
    vocab = {"a": 0, "[UNK]": 1} if kind == "WordPiece" else [["a", 0.0], ["[UNK]", 0.0]]
    model = {"type": kind, "vocab": vocab, "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    model |= {"max_input_chars_per_word": 100} if kind == "WordPiece" else {"unk_id": 1}
    assert f"model: {kind}, not BPE" in refusal(tmp_path, toy("gpt2") | {"model": model, "added_tokens": []})


@pytest.mark.parametrize("name", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_take_their_surroundings(tmp_path: Path, toy: Toy, name: str) -> None:
    document = toy("gpt2")
    document["added_tokens"][1][name] = True
    assert refusal(tmp_path, document).startswith(f"F/tokenizer.json: added token '<|im_start|>': {name};")


def test_normalized_tokens_only_where_that_changes_nothing(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    first = document["added_tokens"][0]["id"]
    blanks = [toys.added(first + 1 + i, " " * (i + 2), normalized=True, special=False) for i in range(3)]
    document["added_tokens"] = [document["added_tokens"][0], *blanks]
    assert len(convert(tmp_path / "phi", document).added()) == 4
    assert "'  ': normalized" in refusal(tmp_path, document | {"normalizer": toys.NFC})
    document["added_tokens"][0]["content"] = " <|end|>"
    assert "'  ': normalized" in refusal(tmp_path, document)


def test_vocabularies_without_all_bytes(tmp_path: Path, toy: Toy) -> None:
    document = toy("llama2")
    document["model"]["vocab"]["<0xZZ>"] = document["model"]["vocab"].pop("<0x41>")
    assert "model byte_fallback: no token for 1 bytes (0x41)" in refusal(tmp_path, document)
    document = toy("gpt2")
    document["model"]["vocab"]["ĠĠ!!"] = document["model"]["vocab"].pop("~")
    document["model"]["merges"] = [m for m in document["model"]["merges"] if "~" not in "".join(m)]
    assert "model vocabulary: no token for 1 bytes (0x7E)" in refusal(tmp_path, document)


def test_pieces_and_tokens_that_have_two_meanings(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    document["model"]["vocab"]["a b"] = len(document["model"]["vocab"])
    document["added_tokens"] = []
    assert "piece 'a b' has characters outside of the byte-level alphabet" in refusal(tmp_path / "a", document)
    document = toy("gpt2")
    document["added_tokens"][2]["content"] = "Ġxyz"
    assert "added token 'Ġxyz': is the byte-level spelling of other text" in refusal(tmp_path / "b", document)
    document = toy("llama2")
    document["added_tokens"].append(toys.added(3, "<0x00>"))
    assert "added token '<0x00>': is a byte-fallback token as well" in refusal(tmp_path / "c", document)
    document = toy("llama2")
    document["added_tokens"].append(toys.added(document["model"]["vocab"]["▁"], "▁"))
    assert "added token '▁': is the piece of a space as well" in refusal(tmp_path / "e", document)
    document = toy("gpt2")
    document["added_tokens"][2]["id"] += 5
    assert "tokenizer.json gives it id" in refusal(tmp_path / "d", document)


def test_any_difference_on_the_corpus_refuses(tmp_path: Path, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that is nearly right is caught by the proof: here Qwen3.5's pattern taken for Qwen3's."""
    from krafla_cli.tokenizer import pipeline

    monkeypatch.setitem(pipeline._PATTERN_FLAGS, toys.QWEN35, Flag.SINGLE_DIGITS)
    message = refusal(tmp_path, toy("qwen3.5"))
    assert "the .mlt would encode" in message
    assert "differently: at token" in message


class Warnings(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


def test_tokens_beyond_the_model(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    first = document["added_tokens"][0]["id"]
    folder, warnings = toys.write(tmp_path, document), Warnings()
    converted = convert_tokenizer(folder, vocab_size=first + 1, progress=warnings)
    assert len(converted.tokens) == first + 1
    assert warnings.texts == [
        f"added token '<|im_start|>' (id {first + 1}) is left out: the model's vocabulary has {first + 1} rows",
        f"added token '<|im_end|>' (id {first + 2}) is left out: the model's vocabulary has {first + 1} rows",
    ]
    assert len(convert_tokenizer(folder, vocab_size=first + 900).tokens) == first + 3
    with pytest.raises(ShapeError, match=f"has id {first - 1}, the model's vocabulary has {first - 1} rows"):
        convert_tokenizer(folder, vocab_size=first - 1)


def test_broken_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"has no tokenizer\.json$"):
        convert_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(FileError, match=r"a tokenizer\.model alone cannot be read"):
        convert_tokenizer(tmp_path)
    with pytest.raises(FileError, match=r"cannot open .*/x: No such file or directory"):
        convert_tokenizer(tmp_path / "x")
    for content in ("", "[]", '{"model": {}}', '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 1e99}}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(FormatError, match=r"tokenizer\.json"):
            convert_tokenizer(tmp_path)


def test_a_post_processor_that_would_crash_the_library(tmp_path: Path, toy: Toy) -> None:
    folder = toys.write(tmp_path, toy("gpt2") | {"post_processor": toys.template("<none>")})
    for action in (convert_tokenizer, load_tokenizer):
        with pytest.raises(FormatError, match="post_processor: the token '<none>' is not among its special_tokens"):
            action(folder)


def test_merges_that_would_crash_the_library(tmp_path: Path, toy: Toy, capfd: pytest.CaptureFixture[str]) -> None:
    document = toy("gpt2")
    document["model"]["continuing_subword_prefix"] = "##"
    folder = toys.write(tmp_path, document)
    for action in (convert_tokenizer, load_tokenizer):
        with pytest.raises(FormatError, match="does not begin with the continuing_subword_prefix '##'"):
            action(folder)
    assert "panicked" not in capfd.readouterr().err


def test_lone_surrogates_in_json(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    document["added_tokens"][0]["content"] = "\ud800"
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(FormatError, match="ud800 is half of a surrogate pair, and no character"):
        convert_tokenizer(tmp_path)


def test_pieces_that_contain_a_space(tmp_path: Path, toy: Toy) -> None:
    """Merges as pairs can hold them; text never leads to them, as its spaces are ▁ by then."""
    document = toy("llama2")
    vocab = document["model"]["vocab"]
    first = len(vocab)
    document["model"]["vocab"] |= {" ": first, " e": first + 1}
    document["model"]["merges"].append([" ", "e"])
    converted = convert(tmp_path, document)
    assert converted.tokens[first : first + 2] == (Token(0, b" "), Token(0, b" e"))
    assert converted.merges[-1].tolist() == [first, vocab["e"], first + 1]


NEMO = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_mistral_nemo_is_refused_for_its_pattern(tmp_path: Path, toy: Toy) -> None:
    document = toy("llama3") | {"pre_tokenizer": toys.sequence(toys.split(NEMO), toys.BYTE_LEVEL)}
    assert "pre_tokenizer: Split by " in refusal(tmp_path, document)


def test_hostile_ids_do_not_allocate(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    document["model"]["vocab"]["zzz"] = 2**32 - 1
    document["added_tokens"] = []
    assert "model: token id 4294967295, the format's limit is 16777216" in refusal(tmp_path, document)


def test_truncation_and_padding_of_a_tokenizer_json_are_ignored(tmp_path: Path, toy: Toy) -> None:
    document = toy("gpt2")
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    folder = toys.write(tmp_path, document)
    assert len(load_tokenizer(folder).encode("a b c d e f").ids) > 2
    assert json.loads(load_tokenizer(folder).to_str())["truncation"] is None
