"""Vocabularies of students: WordPiece tokenizer.json and vocab.txt, and what LEMB cannot represent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFD, BertNormalizer
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing, TemplateProcessing

from krafla_cli.embed.vocabulary import read_vocabulary
from krafla_cli.errors import FileError, FormatError, MlbError, UnsupportedError
from krafla_cli.formats.lemb_layout import TokenizerConfig
from krafla_cli.progress import SILENT, Progress
from tests.embed.students import VOCAB, bert_tokenizer


class Remarks(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)

    info = warn


def saved(folder: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    saved(folder, bert_tokenizer(VOCAB))
    document = json.loads((folder / "tokenizer.json").read_text())
    change(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def test_tokenizer_json(tmp_path: Path) -> None:
    found = read_vocabulary(saved(tmp_path, bert_tokenizer(VOCAB)), SILENT)
    assert found.tokens == VOCAB
    assert found.config == TokenizerConfig(1, 2, 3, 0, 4, 100, 0, "##")
    assert (found.lower_case, found.strip_accents) == (False, False)


@pytest.mark.parametrize(
    ("lowercase", "strip", "expected"),
    [
        (True, None, (True, True)),
        (True, False, (True, False)),
        (False, None, (False, False)),
        (False, True, (False, True)),
    ],
)
def test_flags(tmp_path: Path, lowercase: bool, strip: bool | None, expected: tuple[bool, bool]) -> None:
    tokenizer = bert_tokenizer(VOCAB)
    tokenizer.normalizer = BertNormalizer(lowercase=lowercase, strip_accents=strip)
    found = read_vocabulary(saved(tmp_path, tokenizer), SILENT)
    assert (found.lower_case, found.strip_accents) == expected


def test_prefix_limit_and_unknown_token_are_read(tmp_path: Path) -> None:
    def change(d: dict[str, Any]) -> None:
        d["model"] |= {"continuing_subword_prefix": "@@", "max_input_chars_per_word": 9, "unk_token": "a"}

    found = read_vocabulary(edited(tmp_path, change), SILENT)
    assert (found.config.prefix, found.config.max_input_chars_per_word) == ("@@", 9)
    assert found.config.unk_token_id == VOCAB.index("a")


@pytest.mark.parametrize(
    "post",
    [
        BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
        TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]),
    ],
)
def test_post_processors_that_wrap(tmp_path: Path, post: Any) -> None:
    tokenizer = bert_tokenizer(VOCAB)
    tokenizer.post_processor = post
    assert read_vocabulary(saved(tmp_path, tokenizer), SILENT).tokens == VOCAB


def test_an_added_token_after_the_vocabulary_gets_its_row(tmp_path: Path) -> None:
    tokenizer = bert_tokenizer(VOCAB)
    tokenizer.add_special_tokens(["[QUERY]"])
    remarks = Remarks()
    assert read_vocabulary(saved(tmp_path, tokenizer), remarks).tokens == (*VOCAB, "[QUERY]")
    assert "special token '[QUERY]' in a text is plain text in LEMB" in remarks.texts[0]


def _no_normalizer(t: Tokenizer) -> None:
    t.normalizer = NFD()


def _no_normalizer_at_all(t: Tokenizer) -> None:
    t.normalizer = None


def _no_cleaning(t: Tokenizer) -> None:
    t.normalizer = BertNormalizer(clean_text=False)


def _no_cjk(t: Tokenizer) -> None:
    t.normalizer = BertNormalizer(handle_chinese_chars=False)


def _whitespace(t: Tokenizer) -> None:
    t.pre_tokenizer = Whitespace()


def _added(t: Tokenizer) -> None:
    t.add_tokens([AddedToken("new word")])


def _other_template(t: Tokenizer) -> None:
    t.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_no_normalizer, "the normalizer is NFD, not BertNormalizer"),
        (_no_normalizer_at_all, "the normalizer is missing, not BertNormalizer"),
        (_no_cleaning, "the normalizer has clean_text off"),
        (_no_cjk, "the normalizer has handle_chinese_chars off"),
        (_whitespace, "the pre-tokenizer is Whitespace, not BertPreTokenizer"),
        (_added, "the added token 'new word' is matched before WordPiece"),
        (_other_template, r"the post-processor makes '\[CLS\] \$A' of a text, not \[CLS\] \$A \[SEP\]"),
    ],
)
def test_tokenizers_that_would_tokenize_otherwise(
    tmp_path: Path, change: Callable[[Tokenizer], None], words: str
) -> None:
    tokenizer = bert_tokenizer(VOCAB)
    change(tokenizer)
    with pytest.raises(UnsupportedError, match=words):
        read_vocabulary(saved(tmp_path, tokenizer), SILENT)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="the tokenizer's model is BPE, LEMB holds WordPiece"):
        read_vocabulary(saved(tmp_path, Tokenizer(BPE({"a": 0}, []))), SILENT)


def _drop(token: str) -> Callable[[dict[str, Any]], None]:
    def change(d: dict[str, Any]) -> None:
        d["added_tokens"] = [t for t in d["added_tokens"] if t["content"] != token]
        last = max(d["model"]["vocab"], key=d["model"]["vocab"].get)
        d["model"]["vocab"][last] = d["model"]["vocab"].pop(token)  # no hole

    return change


@pytest.mark.parametrize("token", ["[CLS]", "[SEP]", "[PAD]"])
def test_special_tokens_are_needed(tmp_path: Path, token: str) -> None:
    name = token[1:4].lower()
    with pytest.raises(UnsupportedError, match=rf"the {name} token '\[{token[1:4]}\]' is not in the vocabulary"):
        read_vocabulary(edited(tmp_path, _drop(token)), SILENT)


def test_a_missing_mask_token_is_written_as_unknown(tmp_path: Path) -> None:
    remarks = Remarks()
    found = read_vocabulary(edited(tmp_path, _drop("[MASK]")), remarks)
    assert found.config.mask_token_id == found.config.unk_token_id
    assert "no mask token" in remarks.texts[0]


def test_special_tokens_may_have_other_names(tmp_path: Path) -> None:
    saved(tmp_path, bert_tokenizer(VOCAB))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"cls_token": "a", "sep_token": {"content": "b"}}))
    config = read_vocabulary(tmp_path, SILENT).config
    assert (config.cls_token_id, config.sep_token_id) == (VOCAB.index("a"), VOCAB.index("b"))


def test_holes_and_shared_ids(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no token has id 23 of 24"):
        read_vocabulary(edited(tmp_path, lambda d: d["model"]["vocab"].update({VOCAB[23]: 99})), SILENT)
    with pytest.raises(FormatError, match="24 tokens share 23 ids"):
        read_vocabulary(edited(tmp_path, lambda d: d["model"]["vocab"].update({VOCAB[23]: 22})), SILENT)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 5}', b'{"model": {"type": "WordPiece"}}', b"\xff"])
def test_broken_tokenizer_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(MlbError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path, SILENT)


def test_limits_of_the_format(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="max_input_chars_per_word is 65536"):
        read_vocabulary(edited(tmp_path, lambda d: d["model"].update(max_input_chars_per_word=65536)), SILENT)
    with pytest.raises(UnsupportedError, match="the continuing prefix has 256 bytes"):
        read_vocabulary(edited(tmp_path, lambda d: d["model"].update(continuing_subword_prefix="ü" * 128)), SILENT)


# --- vocab.txt


def vocab_txt(folder: Path, text: str | bytes, **config: Any) -> Path:
    (folder / "vocab.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("text", ["\n".join(VOCAB), "\n".join(VOCAB) + "\n", "\r\n".join(VOCAB) + "\r\n"])
def test_vocab_txt(tmp_path: Path, text: str) -> None:
    found = read_vocabulary(vocab_txt(tmp_path, text), SILENT)
    assert found.tokens == VOCAB
    assert (found.lower_case, found.strip_accents) == (None, None)
    assert found.config == TokenizerConfig(1, 2, 3, 0, 4)


def test_only_line_feeds_end_a_token(tmp_path: Path) -> None:
    tokens = (*VOCAB, "x\u2028y", "\x0b", "\x85", " ")
    assert read_vocabulary(vocab_txt(tmp_path, "\n".join(tokens) + "\n"), SILENT).tokens == tokens


def test_vocab_txt_takes_flags_from_its_config(tmp_path: Path) -> None:
    text = "\n".join(VOCAB)
    found = read_vocabulary(vocab_txt(tmp_path, text, do_lower_case=True), SILENT)
    assert (found.lower_case, found.strip_accents) == (True, True)
    found = read_vocabulary(vocab_txt(tmp_path, text, do_lower_case=True, strip_accents=False), SILENT)
    assert (found.lower_case, found.strip_accents) == (True, False)
    with pytest.raises(FormatError, match='do_lower_case must be true or false, is "yes"'):
        read_vocabulary(vocab_txt(tmp_path, text, do_lower_case="yes"), SILENT)


def test_vocab_txt_faults(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="lines 20 and 25 are both 'a'"):
        read_vocabulary(vocab_txt(tmp_path, "\n".join((*VOCAB, "a"))), SILENT)
    with pytest.raises(FormatError, match="not UTF-8 at byte 2"):
        read_vocabulary(vocab_txt(tmp_path, b"a\n\xff"), SILENT)
    with pytest.raises(UnsupportedError, match=r"the unk token '\[UNK\]' is not in the vocabulary"):
        read_vocabulary(vocab_txt(tmp_path, ""), SILENT)


def test_no_vocabulary_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"has neither tokenizer\.json \(WordPiece\) nor vocab\.txt"):
        read_vocabulary(tmp_path, SILENT)
