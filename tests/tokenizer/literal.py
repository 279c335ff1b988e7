"""A second reading of .mlt, written from the specification alone: slow, literal, without the `tokenizers` library."""

from __future__ import annotations

import itertools
import struct
import unicodedata

import regex

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_LLAMA3 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|NUMBER| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


class LiteralTokenizer:
    """Reads the bytes of a .mlt and encodes with it."""

    def __init__(self, data: bytes) -> None:
        magic, version, self.kind, n_vocab, n_merges, self.bos, self.eos, self.flags = struct.unpack_from(
            "<4sIIIIiiI", data
        )
        assert (magic, version) == (b"MLT1", 1)
        self.added: dict[str, int] = {}
        self.byte_ids: dict[int, int] = {}
        self.pieces: dict[bytes, int] = {}
        at = 32
        for i in range(n_vocab):
            attr, length = struct.unpack_from("<BI", data, at)
            piece = data[at + 5 : at + 5 + length]
            at += 5 + length
            if attr & 1:
                self.added[piece.decode()] = i
            elif attr & 2:
                self.byte_ids[piece[0]] = i
            elif length:
                self.pieces[piece] = i
        self.merges: dict[tuple[int, int], tuple[int, int]] = {}
        for rank in range(n_merges):
            left, right, merged = struct.unpack_from("<3I", data, at + 12 * rank)
            self.merges.setdefault((left, right), (rank, merged))

    def encode(self, text: str) -> list[int]:
        ids = [self.bos] if self.flags & 1 else []
        start = at = 0
        while at < len(text):
            longest = max((a for a in self.added if text.startswith(a, at)), key=len, default="")
            if longest:
                ids += self.segment(text[start:at], start == 0)
                ids.append(self.added[longest])
                at += len(longest)
                start = at
            else:
                at += 1
        return ids + self.segment(text[start:], start == 0)

    def segment(self, text: str, at_start: bool) -> list[int]:
        """The ids of the text between added tokens."""
        if not text:
            return []
        return self.sentencepiece(text, at_start) if self.kind == 1 else self.byte_level(text)

    def sentencepiece(self, text: str, at_start: bool) -> list[int]:
        text = text.replace(" ", "▁")
        if self.flags & 4:
            text = text if text.startswith("▁") or not at_start else "▁" + text
        else:
            text = "▁" + text
        if self.flags & 2 and text.encode() in self.pieces:
            return [self.pieces[text.encode()]]
        ids: list[int] = []
        for char in text.encode().decode():
            piece = char.encode()
            ids += [self.pieces[piece]] if piece in self.pieces else [self.byte_ids[b] for b in piece]
        return self.merge(ids)

    def byte_level(self, text: str) -> list[int]:
        if self.flags & 8:
            text = unicodedata.normalize("NFC", text)
        parts = regex.findall(r"\p{N}|[^\p{N}]+", text) if self.flags & 64 else [text]
        if self.flags & 32:
            pattern = _GPT2
        else:
            pattern = _LLAMA3.replace("NUMBER", r"\p{N}" if self.flags & 16 else r"\p{N}{1,3}")
        ids: list[int] = []
        for part in parts:
            for word in regex.findall(pattern, part):
                data = word.encode()
                if self.flags & 2 and data in self.pieces:
                    ids.append(self.pieces[data])
                else:
                    ids += self.merge([self.pieces[bytes([b])] for b in data])
        return ids

    def merge(self, ids: list[int]) -> list[int]:
        """Applies the lowest-ranked merge that there is, the leftmost of equals, until there is none."""
        while True:
            found = [(*self.merges[pair], i) for i, pair in enumerate(itertools.pairwise(ids)) if pair in self.merges]
            if not found:
                return ids
            _, merged, at = min(found, key=lambda f: (f[0], f[2]))
            ids = [*ids[:at], merged, *ids[at + 2 :]]
