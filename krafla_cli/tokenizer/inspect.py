"""Looking at a tokenizer: its summary, its tokens, and what a text becomes."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from krafla_cli.errors import InputError
from krafla_cli.formats.mlt import ATTR_ADDED, Flag, Kind, Mlt
from krafla_cli.formats.text import printable, printable_bytes
from krafla_cli.tokenizer.stream import TokenBytes

_KIND_NAMES = {Kind.SENTENCEPIECE: "SentencePiece-style BPE", Kind.BYTE_LEVEL: "byte-level BPE"}


def summary(mlt: Mlt) -> dict[str, Any]:
    """What a .mlt holds, for people and for JSON."""
    return {
        "kind": _KIND_NAMES[mlt.kind],
        "flags": int(mlt.flags),
        "flag_names": [f.name.lower() for f in Flag if f in mlt.flags and f.name],
        "n_vocab": len(mlt.tokens),
        "n_added": sum(t.attr == ATTR_ADDED for t in mlt.tokens),
        "n_holes": sum(t == (0, b"") for t in mlt.tokens),
        "n_merges": len(mlt.merges),
        "bos": mlt.bos,
        "eos": mlt.eos,
    }


def encoded(tokenizer: Tokenizer, text: str | bytes, with_bos: bool = True) -> list[int]:
    """The ids of ``text``. Raises InputError when it is not UTF-8 (bytes), or holds lone surrogates (str)."""
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        text.encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InputError(f"the text is not valid UTF-8: {error.reason} at {error.start}") from error
    ids: list[int] = tokenizer.encode(text, add_special_tokens=with_bos).ids
    return ids


def check_ids(ids: list[int], tokenizer: Tokenizer) -> None:
    """Raises InputError for an id that the vocabulary does not have."""
    wrong = next((i for i in ids if tokenizer.id_to_token(i) is None), None)
    if wrong is not None:
        raise InputError(f"{wrong} is no token id; the vocabulary has {tokenizer.get_vocab_size()} of them")


def token_rows(tokenizer: Tokenizer, ids: list[int]) -> list[dict[str, Any]]:
    """For each id: its kind ("added", "byte" for bytes that are no text alone, "piece"), bytes, and printable text."""
    of = TokenBytes(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    rows = []
    for i in ids:
        data = of.of(i)
        text = _text(data)
        kind = "added" if i in added else "piece" if text is not None else "byte"
        rows.append({"id": i, "kind": kind, "text": text, "bytes": data.hex(), "shown": _shown(data)})
    return rows


def all_rows(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """:func:`token_rows` of the whole vocabulary, in the order of the ids."""
    return token_rows(tokenizer, sorted(tokenizer.get_vocab(with_added_tokens=True).values()))


def _text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _shown(data: bytes) -> str:
    text = _text(data)
    return printable_bytes(data) if text is None else f"'{printable(text)}'"
