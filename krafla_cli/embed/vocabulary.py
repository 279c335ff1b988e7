"""The WordPiece vocabulary of a student: tokenizer.json or vocab.txt, refused where LEMB would tokenize otherwise.

LEMB fixes all but two flags of the tokenizer (section 5.2): BERT's normalizer with cleaned text and spaced CJK
characters, BERT's pre-tokenizer, greedy WordPiece, [CLS] and [SEP] around the text, literal special tokens as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from krafla_cli.errors import FileError, FormatError, UnsupportedError
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.json_file import shown_json
from krafla_cli.formats.lemb_layout import TokenizerConfig
from krafla_cli.formats.text import printable
from krafla_cli.progress import Progress
from krafla_cli.tokenizer.source import TOKENIZER_JSON, Source, read_config, read_source, token_text

VOCAB_TXT = "vocab.txt"
_DEFAULT_NAMES = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
_MAX_VOCAB_BYTES = 256 << 20


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in id order, the format's tokenizer section, the two flags (None where ``path`` does not say)."""

    tokens: tuple[str, ...]
    config: TokenizerConfig
    lower_case: bool | None
    strip_accents: bool | None
    path: Path


def read_vocabulary(folder: Path, progress: Progress) -> Vocabulary:
    """The vocabulary of a checkpoint folder: its tokenizer.json, else its vocab.txt.

    Raises FileError (neither is there), FormatError, UnsupportedError (a tokenizer that LEMB cannot represent).
    """
    if (folder / TOKENIZER_JSON).exists():
        return _from_tokenizer_json(read_source(folder), progress)
    if (folder / VOCAB_TXT).exists():
        return _from_vocab_txt(folder / VOCAB_TXT, progress)
    raise FileError(f"{printable(str(folder))}: has neither {TOKENIZER_JSON} (WordPiece) nor {VOCAB_TXT}")


# ---------------------------------------------------------------------------------------------------------------------
# vocab.txt


def _from_vocab_txt(path: Path, progress: Progress) -> Vocabulary:
    name = printable(str(path))
    tokens = _lines(path, name)
    settings = read_config(path.parent)
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if ids.setdefault(token, token_id) != token_id:
            raise FormatError(f"{name}: lines {ids[token] + 1} and {token_id + 1} are both {printable(token, 40)!r}")
    config = TokenizerConfig(**_special_ids(ids, settings, name, progress))
    lower_case = _flag(settings, "do_lower_case", name)
    strip_accents = _flag(settings, "strip_accents", name)
    return Vocabulary(tokens, config, lower_case, lower_case if strip_accents is None else strip_accents, path)


def _lines(path: Path, name: str) -> tuple[str, ...]:
    """One token a line. Only line feeds end a line: tokens may hold any other character."""
    data = map_file(path)
    if len(data) > _MAX_VOCAB_BYTES:
        raise FormatError(f"{name}: {len(data)} bytes, at most {_MAX_VOCAB_BYTES} are read")
    try:
        text = bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{name}: not UTF-8 at byte {error.start}") from error
    lines = text.split("\n")
    return tuple(line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines))


def _flag(settings: Mapping[str, Any], key: str, name: str) -> bool | None:
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        raise FormatError(f"{name}: {key} must be true or false, is {shown_json(value)}")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.json


def _from_tokenizer_json(source: Source, progress: Progress) -> Vocabulary:
    model = _part(source.document, "model")
    kind = model.get("type")
    if kind != "WordPiece":
        raise UnsupportedError(
            f"{source.name}: the tokenizer's model is {_shown_type(kind)}, LEMB holds WordPiece vocabularies only"
        )
    lower_case, strip_accents = _normalizer_flags(source)
    _check_pre_tokenizer(source)
    ids = _all_ids(source, model)
    config = TokenizerConfig(
        **_special_ids(ids, {**source.config, "unk_token": model.get("unk_token")}, source.name, progress),
        max_input_chars_per_word=_max_chars(model, source.name),
        prefix=_prefix(model, source.name),
    )
    _check_template(source, ids, config)
    _check_added_tokens(source, ids, config, progress)
    tokens = tuple(sorted(ids, key=ids.__getitem__))
    return Vocabulary(tokens, config, lower_case, strip_accents, source.path)


def _part(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _shown_type(kind: Any) -> str:
    return "missing" if kind is None else printable(str(kind))


def _refuse(source: Source, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{source.name}: {what}; LEMB would tokenize otherwise. If the student was trained with BERT's tokenization, "
        f"give the vocabulary as {VOCAB_TXT} without a {TOKENIZER_JSON}"
    )


def _normalizer_flags(source: Source) -> tuple[bool, bool]:
    """lowercase and strip_accents of BERT's normalizer, whose other settings must be LEMB's."""
    normalizer = _part(source.document, "normalizer")
    if normalizer.get("type") != "BertNormalizer":
        raise _refuse(source, f"the normalizer is {_shown_type(normalizer.get('type'))}, not BertNormalizer")
    for key in ("clean_text", "handle_chinese_chars"):
        if normalizer.get(key) is not True:
            raise _refuse(source, f"the normalizer has {key} off")
    lower_case = bool(normalizer.get("lowercase"))
    strip_accents = normalizer.get("strip_accents")
    return lower_case, lower_case if strip_accents is None else bool(strip_accents)


def _check_pre_tokenizer(source: Source) -> None:
    kind = _part(source.document, "pre_tokenizer").get("type")
    if kind != "BertPreTokenizer":
        raise _refuse(source, f"the pre-tokenizer is {_shown_type(kind)}, not BertPreTokenizer")


def _all_ids(source: Source, model: Mapping[str, Any]) -> dict[str, int]:
    """token -> id of vocabulary and added tokens, which must be 0 .. n - 1."""
    ids = dict(model.get("vocab", {}))
    for token in _added_tokens(source):
        ids.setdefault(token["content"], token["id"])
    by_id = {token_id: token for token, token_id in ids.items()}
    if len(by_id) != len(ids):
        raise FormatError(f"{source.name}: {len(ids)} tokens share {len(by_id)} ids")
    hole = next((i for i in range(len(ids)) if i not in by_id), None)
    if hole is not None:
        raise UnsupportedError(f"{source.name}: no token has id {hole} of {len(ids)}, LEMB's vocabulary has no holes")
    return ids


def _added_tokens(source: Source) -> Iterable[dict[str, Any]]:
    # The library has read the document: these entries have their fields.
    return [t for t in source.document.get("added_tokens") or () if isinstance(t, dict)]


def _check_added_tokens(source: Source, ids: Mapping[str, int], config: TokenizerConfig, progress: Progress) -> None:
    """Added tokens are cut out of a text before WordPiece, which LEMB does not do."""
    known = {config.unk_token_id, config.cls_token_id, config.sep_token_id, config.pad_token_id, config.mask_token_id}
    for token in _added_tokens(source):
        content = printable(token["content"], 40)
        if not token.get("special"):
            raise _refuse(source, f"the added token {content!r} is matched before WordPiece")
        if ids[token["content"]] not in known:
            progress.warn(f"{source.name}: special token {content!r} in a text is plain text in LEMB")


def _check_template(source: Source, ids: Mapping[str, int], config: TokenizerConfig) -> None:
    """A post-processor, where there is one, must wrap a text in [CLS] and [SEP]."""
    post = _part(source.document, "post_processor")
    if post.get("type") == "BertProcessing":
        found: list[Any] = [post["cls"][0], None, post["sep"][0]]
    elif post.get("type") == "TemplateProcessing":
        found = [_part(p, "SpecialToken").get("id") for p in post["single"]]
    elif post:
        raise _refuse(source, f"the post-processor is {_shown_type(post.get('type'))}")
    else:
        return
    if [ids.get(t) if t is not None else None for t in found] != [config.cls_token_id, None, config.sep_token_id]:
        shown = " ".join("$A" if t is None else printable(str(t), 40) for t in found)
        raise _refuse(source, f"the post-processor makes {shown!r} of a text, not [CLS] $A [SEP]")


# ---------------------------------------------------------------------------------------------------------------------
# Special tokens and limits


def _special_ids(ids: Mapping[str, int], settings: Mapping[str, Any], name: str, progress: Progress) -> dict[str, Any]:
    """The ids of the five special tokens by the format's field names; ``settings`` may rename BERT's tokens."""
    found: dict[str, int] = {}
    for key, default in _DEFAULT_NAMES.items():
        token = token_text(settings.get(f"{key}_token")) or default
        field = f"{key}_token_id"
        if token in ids:
            found[field] = ids[token]
        elif key == "mask":
            # Nothing at inference time uses it, but the format wants an id.
            progress.info(f"{name}: no mask token {printable(token, 40)!r}; its id is written as the unknown token's")
            found[field] = found["unk_token_id"]
        else:
            raise UnsupportedError(f"{name}: the {key} token {printable(token, 40)!r} is not in the vocabulary")
    return found


def _max_chars(model: Mapping[str, Any], name: str) -> int:
    value = int(model.get("max_input_chars_per_word", 100))
    if value > 0xFFFF:
        raise UnsupportedError(f"{name}: max_input_chars_per_word is {value}, the format holds 0 to 65535")
    return value


def _prefix(model: Mapping[str, Any], name: str) -> str:
    prefix = str(model.get("continuing_subword_prefix", "##"))
    n_bytes = len(prefix.encode())
    if n_bytes > 255:
        raise UnsupportedError(f"{name}: the continuing prefix has {n_bytes} bytes, the format holds 255")
    return prefix
