"""tokenizer.json -> .mlt: what can be mapped is mapped, the result is proven on text, anything else is refused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken

from krafla_cli.errors import ShapeError, UnsupportedError
from krafla_cli.formats.mlt import (
    ATTR_ADDED,
    ATTR_BYTE,
    MAX_VOCAB,
    SPACE_MARK,
    Flag,
    Kind,
    Mlt,
    Token,
    describe_bytes,
    missing_bytes,
)
from krafla_cli.formats.text import printable
from krafla_cli.progress import SILENT, Progress
from krafla_cli.tokenizer.pieces import byte_level_bytes, byte_token_value
from krafla_cli.tokenizer.pipeline import Pipeline, read_pipeline, refuse
from krafla_cli.tokenizer.proof import prove
from krafla_cli.tokenizer.source import Source, read_source, token_text

_HOLE = Token(0, b"")


@dataclass(frozen=True)
class Conversion:
    """A converted tokenizer, the warnings, and the number of lines on which it was compared with its source."""

    mlt: Mlt
    warnings: tuple[str, ...]
    n_lines: int


def convert_tokenizer(path: str | os.PathLike[str], vocab_size: int | None = None, progress: Progress = SILENT) -> Mlt:
    """The .mlt of a tokenizer.json (a file, or the folder that holds it); see :func:`convert_with_proof`."""
    conversion = convert_with_proof(path, vocab_size)
    for warning in conversion.warnings:
        progress.warn(warning)
    return conversion.mlt


def convert_with_proof(path: str | os.PathLike[str], vocab_size: int | None = None) -> Conversion:
    """Converts and proves the tokenizer at ``path``.

    With ``vocab_size`` (the model's), added tokens whose ids are not below it are dropped with a warning.
    Raises FileError, FormatError; ShapeError for another token with such an id; UnsupportedError naming the part that
    .mlt cannot express, or the text on which the result and its source differ.
    """
    return convert_source(read_source(path), vocab_size)


def convert_source(source: Source, vocab_size: int | None = None) -> Conversion:
    """As :func:`convert_with_proof`, of a tokenizer.json that has been read or made."""
    try:
        return _convert(source, vocab_size)
    except (UnsupportedError, ShapeError) as error:
        raise type(error)(f"{source.name}: {error}") from error


def _convert(source: Source, vocab_size: int | None) -> Conversion:
    pipeline = read_pipeline(source.tokenizer)
    vocab = source.tokenizer.get_vocab(with_added_tokens=False)
    added = _added_tokens(source)
    warnings, added = _fit_to_model(vocab, added, vocab_size)
    mlt = Mlt(
        kind=pipeline.kind,
        flags=_flags(source, pipeline),
        bos=_bos(source, pipeline, vocab, added),
        eos=_config_id(source, "eos_token", vocab, added),
        tokens=_tokens(pipeline.kind, vocab, added),
        merges=_merges(source, vocab),
    )
    _check_bytes(mlt)
    return Conversion(mlt, tuple(warnings), prove(mlt, source.tokenizer))


def _flags(source: Source, pipeline: Pipeline) -> Flag:
    if not source.tokenizer.model.ignore_merges:
        return pipeline.flags
    if pipeline.kind == Kind.SENTENCEPIECE and Flag.PREFIX_FIRST_ONLY in pipeline.flags:
        # The library takes the text "<0x41>" after an added token for the byte token, a reader of .mlt does not.
        raise refuse("model", "ignore_merges with byte_fallback and a ▁ only at the start of the text")
    return pipeline.flags | Flag.IGNORE_MERGES


def _added_tokens(source: Source) -> dict[int, str]:
    """The added tokens by id. Raises UnsupportedError for one that is not matched literally on the raw text."""
    added: dict[int, AddedToken] = source.tokenizer.get_added_tokens_decoder()
    ids = {token.content: i for i, token in added.items()}
    for entry in source.document.get("added_tokens") or []:
        content, given = entry["content"], ids.get(entry["content"])
        if given is not None and given != entry["id"]:
            raise refuse(
                f"added token {printable(content)!r}",
                f"tokenizer.json gives it id {entry['id']}, the tokenizers library {given}",
            )
    for token in added.values():
        for name in ("lstrip", "rstrip", "single_word"):
            if getattr(token, name):
                raise refuse(f"added token {printable(token.content)!r}", name)
    _check_normalized(source, list(added.values()))
    return {i: token.content for i, token in added.items()}


def _check_normalized(source: Source, added: list[AddedToken]) -> None:
    """Refuses tokens matched after normalization, unless that is the same as matching them on the raw text.

    It is where there is no normalizer, and no such token can overlap one that is matched before.
    """
    late = [t.content for t in added if t.normalized]
    if not late:
        return
    early = [t.content for t in added if not t.normalized]
    clash = _overlapping(late, early) if source.tokenizer.normalizer is None else late[0]
    if clash is not None:
        raise refuse(f"added token {printable(clash)!r}", "normalized (matched after normalization)")


def _overlapping(late: list[str], early: list[str]) -> str | None:
    """The first of ``late`` that shares text with one of ``early`` in some string: inside, or end on start."""
    chars = set().union(*map(set, early)) if early else set()
    for a in late:
        if chars.isdisjoint(a):
            continue
        for b in early:
            if a in b or b in a or any(a[-k:] == b[:k] or b[-k:] == a[:k] for k in range(1, min(len(a), len(b)))):
                return a
    return None


def _fit_to_model(
    vocab: dict[str, int], added: dict[int, str], vocab_size: int | None
) -> tuple[list[str], dict[int, str]]:
    """Warnings, and the added tokens that the model has rows for. Raises ShapeError for a piece without one."""
    highest = max([*vocab.values(), *added], default=-1)
    if highest < 0:
        raise refuse("model", "the vocabulary is empty")
    if highest >= MAX_VOCAB:
        raise refuse("model", f"token id {highest}, the format's limit is {MAX_VOCAB}")
    if vocab_size is None:
        return [], added
    outside = {i: text for i, text in added.items() if i >= vocab_size}
    piece = next((p for p, i in vocab.items() if i >= vocab_size and i not in added), None)
    if piece is not None:
        raise ShapeError(
            f"token {printable(piece, 40)!r} has id {vocab[piece]}, the model's vocabulary has {vocab_size} rows"
        )
    warnings = [
        f"added token {printable(text, 40)!r} (id {i}) is left out: the model's vocabulary has {vocab_size} rows"
        for i, text in islice(sorted(outside.items()), 4)
    ]
    if len(outside) > 4:
        warnings.append(f"{len(outside) - 4} more added tokens are left out for the same reason")
    for text in outside.values():
        vocab.pop(text, None)
    return warnings, {i: text for i, text in added.items() if i < vocab_size}


def _bos(source: Source, pipeline: Pipeline, vocab: dict[str, int], added: dict[int, str]) -> int:
    if pipeline.bos < 0:
        return _config_id(source, "bos_token", vocab, added)
    if pipeline.bos not in added and pipeline.bos not in vocab.values():
        raise refuse("post_processor", f"adds token {pipeline.bos}, which does not exist")
    return pipeline.bos


def _config_id(source: Source, name: str, vocab: dict[str, int], added: dict[int, str]) -> int:
    """The id of tokenizer_config.json's "bos_token" or "eos_token", -1 without one."""
    text = token_text(source.config.get(name))
    if text is None:
        return -1
    return next((i for i, content in added.items() if content == text), vocab.get(text, -1))


def _tokens(kind: Kind, vocab: dict[str, int], added: dict[int, str]) -> tuple[Token, ...]:
    """All tokens by id; ids that no token has are holes."""
    tokens = [_HOLE] * (max([*vocab.values(), *added]) + 1)
    for piece, i in vocab.items():
        if i in added:
            continue
        if tokens[i] is not _HOLE:
            raise refuse("model", f"token id {i} stands for two pieces")
        tokens[i] = _piece_token(kind, piece)
    for i, content in added.items():
        _check_added(kind, content)
        tokens[i] = Token(ATTR_ADDED, content.encode("utf-8"))
    return tuple(tokens)


def _piece_token(kind: Kind, piece: str) -> Token:
    if kind == Kind.SENTENCEPIECE:
        value = byte_token_value(piece)
        return Token(0, piece.encode("utf-8")) if value is None else Token(ATTR_BYTE, bytes([value]))
    data = byte_level_bytes(piece)
    if data is None:
        raise refuse("model", f"piece {piece[:40]!r} has characters outside of the byte-level alphabet")
    return Token(0, data)


def _check_added(kind: Kind, content: str) -> None:
    """Refuses an added token whose text the model could also read as a piece that stands for something else."""
    if kind == Kind.SENTENCEPIECE:
        stands_for_byte = byte_token_value(content) is not None
        if stands_for_byte:
            raise refuse(f"added token {printable(content)!r}", "is a byte-fallback token as well")
        if content == SPACE_MARK:  # as an added token it is no piece, and spaces in text would have none
            raise refuse(f"added token {content!r}", "is the piece of a space as well")
        return
    data = byte_level_bytes(content)
    if data is not None and data != content.encode("utf-8"):
        raise refuse(f"added token {printable(content)!r}", "is the byte-level spelling of other text")


def _merges(source: Source, vocab: dict[str, int]) -> npt.NDArray[np.uint32]:
    """uint32 [n_merges, 3]. Of a pair listed twice the library keeps the last rank, and so do we."""
    ranks: dict[tuple[str, str], int] = {}
    for rank, entry in enumerate(source.document["model"].get("merges") or []):
        if isinstance(entry, str) and entry.startswith("#version"):
            continue
        left, right = entry.split(" ") if isinstance(entry, str) else entry
        ranks[left, right] = rank
    rows = [(vocab[a], vocab[b], vocab[a + b]) for (a, b), _ in _by_rank(ranks) if _known(vocab, a, b)]
    return np.array(rows, dtype=np.uint32).reshape(-1, 3)


def _by_rank(ranks: dict[tuple[str, str], int]) -> Iterable[tuple[tuple[str, str], int]]:
    return sorted(ranks.items(), key=lambda item: item[1])


def _known(vocab: dict[str, int], left: str, right: str) -> bool:
    """Whether a merge's tokens are in the vocabulary (they are not where one was left out for the model's sake)."""
    return left in vocab and right in vocab and left + right in vocab


def _check_bytes(mlt: Mlt) -> None:
    missing = missing_bytes(mlt.tokens, mlt.kind)
    if missing:
        part = "byte_fallback" if mlt.kind == Kind.SENTENCEPIECE else "vocabulary"
        raise refuse(f"model {part}", f"no token for {describe_bytes(missing)}")
