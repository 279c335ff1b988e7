"""The .mlt tokenizer format, version 1 (specification: ".mlt tokenizer format"): read, write, validate."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.faults import FORMAT, Fault, Report, fault_error
from krafla_cli.formats.layout import Field, Layout, Rule, Values, in_range, one_of
from krafla_cli.formats.text import printable_bytes

MAGIC = b"MLT1"
VERSION = 1
MAX_VOCAB = 1 << 24  # the limit of a model's vocab
SPACE_MARK = "▁"  # U+2581, a space in SentencePiece pieces
_TOKEN_HEAD = struct.Struct("<BI")
_MERGE_BYTES = 12


class Kind(IntEnum):
    """The field ``kind``."""

    SENTENCEPIECE = 1
    BYTE_LEVEL = 2


class Flag(IntFlag):
    """The bits of the field ``flags``."""

    ADD_BOS = 1
    IGNORE_MERGES = 2
    PREFIX_FIRST_ONLY = 4
    NFC = 8
    SINGLE_DIGITS = 16
    GPT2_REGEX = 32
    SPLIT_DIGITS = 64


# The bits of a token's attr. Plain numbers: enumerations are slow, and a vocabulary has 10^5 of them.
ATTR_ADDED = 1
ATTR_BYTE = 2


_FLAG_MASK = int(Flag.SPLIT_DIGITS) * 2 - 1
# Flags that say something about one kind only; on the other they change nothing.
_KIND_FLAGS = {
    Kind.SENTENCEPIECE: Flag.PREFIX_FIRST_ONLY,
    Kind.BYTE_LEVEL: Flag.NFC | Flag.SINGLE_DIGITS | Flag.GPT2_REGEX | Flag.SPLIT_DIGITS,
}


class Token(NamedTuple):
    """One token: its attribute bits and the bytes that it stands for. attr 0 without bytes is a hole in the ids."""

    attr: int
    data: bytes


@dataclass(frozen=True)
class Mlt:
    """A whole tokenizer. ``merges`` is uint32 [n_merges, 3]: left, right and merged id, in rank order."""

    kind: Kind
    flags: Flag
    bos: int
    eos: int
    tokens: tuple[Token, ...]
    merges: npt.NDArray[np.uint32]

    def added(self) -> dict[int, str]:
        """The added tokens by id, as text."""
        return {i: t.data.decode("utf-8") for i, t in enumerate(self.tokens) if t.attr == ATTR_ADDED}


def _is_id(value: int, values: Values) -> bool:
    return bool(-1 <= value < values["n_vocab"])


_ID_RULE = Rule(_is_id, "must be -1 or a token id below n_vocab")

LAYOUT = Layout(
    32,
    (
        Field("magic", 0, "4s", "MLT1", (Rule(one_of(MAGIC), 'must be "MLT1"'),)),
        Field("version", 4, "I", "format version", (Rule(one_of(VERSION), "must be 1"),)),
        Field("kind", 8, "I", "1 SentencePiece-style BPE, 2 byte-level BPE", (Rule(one_of(1, 2), "must be 1 or 2"),)),
        Field(
            "n_vocab",
            12,
            "I",
            "number of tokens",
            (Rule(in_range(1, MAX_VOCAB), f"must be between 1 and {MAX_VOCAB}"),),
        ),
        Field("n_merges", 16, "I", "number of merge rules"),
        Field(
            "bos",
            20,
            "i",
            "BOS id, -1 none",
            (
                _ID_RULE,
                Rule(lambda bos, values: bos >= 0 or not values["flags"] & Flag.ADD_BOS, "must be set with flag 1"),
            ),
        ),
        Field("eos", 24, "i", "EOS id, -1 none", (_ID_RULE,)),
        Field(
            "flags", 28, "I", "encoding flags", (Rule(lambda flags, _: not flags & ~_FLAG_MASK, "bits above 64 are 0"),)
        ),
    ),
)
# Without these being right, the rest of the bytes means nothing.
_DECIDING = ("magic", "version", "n_vocab")


def read(path: str | os.PathLike[str]) -> Mlt:
    """Reads ``path``. Raises FileError (cannot be opened) or FormatError (the first fault that ``validate`` lists)."""
    reading = _Reading(path)
    reading.report.raise_first()
    return reading.mlt()


def validate(path: str | os.PathLike[str]) -> Report:
    """Every broken rule of ``path``, in the order of the file. Raises FileError when it cannot be opened."""
    return _Reading(path).report


def to_bytes(mlt: Mlt) -> bytes:
    """The bytes of ``mlt``. Raises FormatError when it breaks a rule of the format."""
    head = LAYOUT.pack(
        {
            "magic": MAGIC,
            "version": VERSION,
            "kind": mlt.kind,
            "n_vocab": len(mlt.tokens),
            "n_merges": len(mlt.merges),
            "bos": mlt.bos,
            "eos": mlt.eos,
            "flags": mlt.flags,
        }
    )
    tokens = b"".join(_TOKEN_HEAD.pack(t.attr, len(t.data)) + t.data for t in mlt.tokens)
    data = head + tokens + np.ascontiguousarray(mlt.merges, dtype="<u4").tobytes()
    report = Report("the tokenizer to write", "mlt")
    _Reading.of_bytes(memoryview(data), report)
    report.raise_first()
    return data


class _Reading:
    """One pass over a file's bytes; ``report`` holds the faults, the rest what could be read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._read(map_file(path), Report(str(path), "mlt"))

    @classmethod
    def of_bytes(cls, data: memoryview, report: Report) -> _Reading:
        reading = cls.__new__(cls)
        reading._read(data, report)
        return reading

    def _read(self, data: memoryview, report: Report) -> None:
        self.data = data
        self.report = report
        self.values: dict[str, Any] = {}
        self.tokens: list[Token] = []
        self.offsets: list[int] = []
        self.merges: npt.NDArray[np.uint32] = np.zeros((0, 3), np.uint32)
        if self._header() and self._token_list():
            self._merge_list()
            self._check_tokens()
            self._check_merges()

    def mlt(self) -> Mlt:
        v = self.values
        return Mlt(Kind(v["kind"]), Flag(v["flags"]), v["bos"], v["eos"], tuple(self.tokens), self.merges)

    def _fault(self, where: str, offset: int | None, message: str) -> None:
        self.report.fault(FORMAT, where, offset, message)

    def _header(self) -> bool:
        n_bytes = len(self.data)
        if n_bytes < LAYOUT.n_bytes:
            what = "is empty" if n_bytes == 0 else f"has {n_bytes} bytes, the header needs {LAYOUT.n_bytes}"
            self._fault("file", None, what)
            return False
        self.values = LAYOUT.unpack(self.data)
        faults: list[Fault] = list(LAYOUT.faults(self.values))
        self.report.faults += faults
        self._warn_flags()
        return not any(f.where in _DECIDING for f in faults)

    def _warn_flags(self) -> None:
        kind, flags = self.values["kind"], Flag(self.values["flags"] & _FLAG_MASK)
        idle = Flag(0)
        for other, kind_flags in _KIND_FLAGS.items():
            idle |= flags & kind_flags if kind in (1, 2) and kind != other else Flag(0)
        if Flag.GPT2_REGEX in flags:
            idle |= flags & Flag.SINGLE_DIGITS
        if idle:
            self.report.warn("flags", LAYOUT["flags"].offset, f"{idle.value} has no meaning here and is ignored")

    def _token_list(self) -> bool:
        """Reads the tokens; false when the file ends before the last one."""
        n_vocab, offset, end = self.values["n_vocab"], LAYOUT.n_bytes, len(self.data)
        least = n_vocab * _TOKEN_HEAD.size
        if least > end - offset:
            self._fault("n_vocab", 12, f"{n_vocab} tokens need at least {least} bytes, the file has {end - offset}")
            return False
        for i in range(n_vocab):
            if offset + _TOKEN_HEAD.size > end:
                self._fault(f"token {i}", offset, f"needs 5 bytes, the file has {end - offset} left")
                return False
            attr, n_bytes = _TOKEN_HEAD.unpack_from(self.data, offset)
            start = offset + _TOKEN_HEAD.size
            if n_bytes > end - start:
                self._fault(f"token {i}", offset + 1, f"length {n_bytes}, the file has {end - start} bytes left")
                return False
            self.offsets.append(offset)
            offset = start + n_bytes
            self.tokens.append(Token(attr, bytes(self.data[start:offset])))
        self.merges_offset = offset
        return True

    def _merge_list(self) -> None:
        n_merges, n_left = self.values["n_merges"], len(self.data) - self.merges_offset
        n_bytes = n_merges * _MERGE_BYTES
        if n_bytes > n_left:
            self._fault("n_merges", 16, f"{n_merges} merges need {n_bytes} bytes, the file has {n_left} left")
            return
        merges = np.frombuffer(self.data, "<u4", 3 * n_merges, self.merges_offset)
        self.merges = merges.reshape(-1, 3).astype(np.uint32)
        if n_bytes < n_left:
            self._fault("end of file", self.merges_offset + n_bytes, f"{n_left - n_bytes} bytes follow the last merge")

    def _check_tokens(self) -> None:
        for i, token in enumerate(self.tokens):
            message = _token_fault(token, self.values["kind"])
            if message:
                self._fault(f"token {i}", self.offsets[i], message)
        for where, message in _token_warnings(self.tokens, self.values["kind"]):
            self.report.warn(where, None, message)
        for name in ("bos", "eos"):
            i = self.values[name]
            if 0 <= i < len(self.tokens) and self.tokens[i] == (0, b""):
                self.report.warn(name, LAYOUT[name].offset, f"token {i} is a hole")

    def _check_merges(self) -> None:
        outside = set(np.flatnonzero((self.merges >= len(self.tokens)).any(axis=1)).tolist())
        data = [t.data for t in self.tokens]
        for rank, (left, right, merged) in enumerate(self.merges.tolist()):
            if rank in outside:
                message = f"ids must be below n_vocab, is {len(data)}"
            elif data[left] + data[right] != data[merged]:
                message = f"token {merged} must hold the bytes of {left}, then {right}"
            else:
                continue
            offset = self.merges_offset + rank * _MERGE_BYTES
            self._fault(f"merge {rank}", offset, f"({left}, {right}, {merged}): {message}")
        pairs = self.merges.astype(np.uint64)
        keys = np.sort(pairs[:, 0] << np.uint64(32) | pairs[:, 1])
        n_repeated = int(np.count_nonzero(keys[1:] == keys[:-1]))
        if n_repeated:
            self.report.warn("merges", self.merges_offset, f"{n_repeated} pairs are repeated; the first rank counts")


def _token_fault(token: Token, kind: int) -> str:
    """What is wrong with one token, "" when nothing is."""
    attr, data = token
    if attr == 0:
        return "" if kind != 1 or _is_utf8(data) else _not_utf8(data)
    if attr == ATTR_ADDED:
        if not data:
            return "an added token needs text, has length 0"
        return "" if _is_utf8(data) else _not_utf8(data)
    if attr != ATTR_BYTE:
        return f"attr must be 0, 1 (added) or 2 (byte), is {attr}"
    if kind != 1:
        return f"attr 2 (byte fallback) belongs to kind 1, kind is {kind}"
    return "" if len(data) == 1 else f"a byte token holds one byte, has {len(data)}"


def _not_utf8(data: bytes) -> str:
    return f"must be UTF-8, is {printable_bytes(data, 40)}"


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _token_warnings(tokens: list[Token], kind: int) -> Iterator[tuple[str, str]]:
    first: dict[Token, int] = {}
    for i, token in enumerate(tokens):
        if token.data and first.setdefault(token, i) != i:
            yield f"token {i}", f"repeats token {first[token]}; text is never encoded to it"
    missing = missing_bytes(tokens, kind)
    if missing:
        yield "tokens", f"no token for {describe_bytes(missing)}: text that holds them cannot be encoded"


# UTF-8 never contains these (RFC 3629, section 1).
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


def missing_bytes(tokens: tuple[Token, ...] | list[Token], kind: int) -> list[int]:
    """The bytes that text may need and no token stands for: byte-fallback tokens in kind 1, pieces in kind 2."""
    if kind == Kind.SENTENCEPIECE:
        present = {t.data[0] for t in tokens if t.attr == ATTR_BYTE and t.data}
        return [b for b in range(256) if b not in present]
    present = {t.data[0] for t in tokens if t.attr == 0 and len(t.data) == 1}
    return [b for b in range(256) if b not in present and b not in _NEVER_IN_UTF8]


def describe_bytes(values: list[int]) -> str:
    """``values`` for a message: the first ones in hexadecimal and how many there are."""
    shown = ", ".join(f"0x{b:02X}" for b in values[:4])
    return f"{len(values)} bytes ({shown}{', ...' if len(values) > 4 else ''})"


__all__ = [
    "ATTR_ADDED",
    "ATTR_BYTE",
    "LAYOUT",
    "MAGIC",
    "Flag",
    "Kind",
    "Mlt",
    "Token",
    "describe_bytes",
    "fault_error",
    "missing_bytes",
    "read",
    "to_bytes",
    "validate",
]
