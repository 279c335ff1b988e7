"""Token ids to text as they come: whole characters only, and stop texts that are never shown half."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from krafla_cli.errors import UnsupportedError
from krafla_cli.formats.text import printable
from krafla_cli.tokenizer.pieces import byte_level_bytes, byte_token_value
from krafla_cli.tokenizer.pipeline import parts, shown


class TokenBytes:
    """The bytes that each id adds to the text, following the tokenizer's decoder.

    ``n_strip`` is the number of spaces that the decoder takes from the start of a text (the ▁ prefix of
    SentencePiece). Raises UnsupportedError for a decoder whose tokens are not simply joined.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = False
        self._byte_fallback = False
        self.n_strip = 0
        for part in parts(tokenizer, "decoder"):
            self._read(part)

    def _read(self, part: dict[str, Any]) -> None:
        match part:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme}:
                self._replacements.append((mark, " "))
                self.n_strip = 0 if scheme == "never" else 1
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                self.n_strip = start
            case _:
                raise UnsupportedError(f"decoder: {printable(shown(part))} is none of a BPE tokenizer that is known")

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a special (control) token."""
        return token_id in self._added and bool(self._added[token_id].special)

    def of(self, token_id: int) -> bytes:
        """The bytes of ``token_id``; none for an id that is not in the vocabulary."""
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            if token_id in self._added:
                return piece.encode("utf-8")
            data = byte_level_bytes(piece)
            return piece.encode("utf-8") if data is None else data
        value = byte_token_value(piece) if self._byte_fallback else None
        if value is not None:
            return bytes([value])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode("utf-8")


class StreamDecoder:
    """Decodes ids one at a time.

    ``push`` returns the text that is certain after the id: a character whose bytes come in several tokens appears with
    its last one, U+FFFD only where no continuation can make the bytes valid. ``flush`` returns what is left at the end.
    The pieces joined are the decoded text; spaces are never tidied.

    ``skip_special_tokens`` leaves control tokens out. ``continuation``: the text continues another one, so that a
    leading space is a space and not the SentencePiece prefix.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False, continuation: bool = False) -> None:
        self._bytes = TokenBytes(tokenizer)
        self._skip = skip_special_tokens
        self._n_strip = 0 if continuation else self._bytes.n_strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with ``token_id``, often ""."""
        if self._skip and self._bytes.is_special(token_id):
            return ""
        return self._stripped(self._utf8.decode(self._bytes.of(token_id)))

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character that stays unfinished. The decoder can be used again."""
        text = self._stripped(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        return text

    def _stripped(self, text: str) -> str:
        while self._n_strip and text:
            if text[0] != " ":
                self._n_strip = 0
                break
            text = text[1:]
            self._n_strip -= 1
        return text


def decode(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
    """The text of ``ids``; as :class:`StreamDecoder` gives it piece by piece."""
    stream = StreamDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
    return "".join([*(stream.push(i) for i in ids), stream.flush()])


class StopText:
    """Ends a text at the first of ``stops``, wherever token borders lie; text that may begin one is held back.

    After each ``push``, ``found`` is the stop text that was met (None before); nothing is returned from then on.
    The stop that ends first counts, of those that end together the longest, so that pieces make no difference.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that can be shown now, without any of a stop text."""
        if self.found is not None:
            return ""
        self._held += text
        ends = [(self._held.find(s) + len(s), self._held.find(s), s) for s in self._stops if s in self._held]
        if ends:
            _, at, self.found = min(ends)
            shown_text, self._held = self._held[:at], ""
            return shown_text
        return self._release(self._n_beginning())

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        return self._release(0)

    def _release(self, n_kept: int) -> str:
        cut = len(self._held) - n_kept
        shown_text, self._held = self._held[:cut], self._held[cut:]
        return shown_text

    def _n_beginning(self) -> int:
        """The length of the longest end of the held text with which a stop text begins."""
        longest = max((len(s) - 1 for s in self._stops), default=0)
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stops):
                return n
        return 0
