"""Spellings of tokens: what a tokenizer.json writes, and the bytes or text that it stands for."""

from __future__ import annotations

import re

from krafla_cli.formats.mlt import ATTR_ADDED, ATTR_BYTE, Kind, Token

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Tags that a model writes in its own replies (thinking, tools). They show up in text like other words; every other
# added token is a control token, which `tokenizers` calls special.
_REPLY_TAG = re.compile(r"</?(think|thinking|tool_call|tool_response)>")


def _byte_chars() -> list[str]:
    """The character that byte-level BPE writes for each byte: printable Latin-1 as it is, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    code = {b: b for b in printable} | {b: 0x100 + i for i, b in enumerate(others)}
    return [chr(code[b]) for b in range(256)]


BYTE_CHARS = _byte_chars()
CHAR_BYTES = {char: byte for byte, char in enumerate(BYTE_CHARS)}
_TO_CHARS = {byte: ord(char) for byte, char in enumerate(BYTE_CHARS)}


def byte_level_bytes(piece: str) -> bytes | None:
    """The bytes of a byte-level piece; None when it has a character outside of the byte alphabet."""
    try:
        return bytes([CHAR_BYTES[c] for c in piece])
    except KeyError:
        return None


def byte_level_piece(data: bytes) -> str:
    """The byte-level spelling of ``data``."""
    return data.decode("latin-1").translate(_TO_CHARS)


def byte_token_value(piece: str) -> int | None:
    """The byte of a SentencePiece byte-fallback token "<0xXX>", or None."""
    match = _BYTE_TOKEN.fullmatch(piece)
    return int(match[1], 16) if match else None


def spelling(token: Token, kind: Kind) -> str:
    """How ``token`` is spelled in the vocabulary of a `tokenizers` BPE model."""
    if token.attr == ATTR_BYTE:
        return f"<0x{token.data[0]:02X}>"
    if token.attr == ATTR_ADDED or kind == Kind.SENTENCEPIECE:
        return token.data.decode("utf-8")
    return byte_level_piece(token.data)


def is_control(content: str) -> bool:
    """Whether an added token of a .mlt is a control token: not blank, and no tag that models write in their replies.

    The format does not record it; a tokenizer.json does ("special").
    """
    return not is_blank(content) and not is_reply_tag(content)


def is_blank(content: str) -> bool:
    """Whether an added token is a run of blanks."""
    return not content.strip(" \t\n\r▁")


def is_reply_tag(content: str) -> bool:
    """Whether an added token is a tag that models write in their replies."""
    return _REPLY_TAG.fullmatch(content) is not None
