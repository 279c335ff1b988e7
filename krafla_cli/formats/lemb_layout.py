"""The LEMB embedding-model format, version 1, as data: header table, section types, and the list of a model's tensors.

Reading, writing and describing files are in ``lemb.py``, the checks in ``lemb_check.py``.
Source: the LEMB specification, sections 2 to 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from krafla_cli.formats.faults import SHAPE
from krafla_cli.formats.layout import Rule, header_field, in_range, layout_of, one_of

MAGIC = b"LEMB"
FORMAT_VERSION = 1
HEADER_BYTES = 64
HASH_BYTES = 32  # trailing SHA-256
SECTION_ENTRY_BYTES = 20
ALIGNMENT = 8
MAX_MATRYOSHKA = 8
MAX_TOKEN_BYTES = 255

FLAG_FINGERPRINT, FLAG_LOWER_CASE, FLAG_STRIP_ACCENTS = 1, 2, 4
_KNOWN_FLAGS = FLAG_FINGERPRINT | FLAG_LOWER_CASE | FLAG_STRIP_ACCENTS

EMBEDDING_QUANTS = ("fp32", "int8", "int4", "ternary")  # by their number in the header
WEIGHT_QUANTS = ("fp32", "ternary")
# Elements that share a byte; fp32 elements take four.
_PER_BYTE = {"int8": 1, "int4": 2, "ternary": 4}

TOKENIZER_VOCAB, TOKENIZER_CONFIG, EMBEDDING_WEIGHTS, EMBEDDING_SCALES = 1, 2, 3, 4
LAYERS, FINAL_LN, PROJECTION, METADATA = 5, 6, 7, 8
SECTION_NAMES = {
    TOKENIZER_VOCAB: "TOKENIZER_VOCAB",
    TOKENIZER_CONFIG: "TOKENIZER_CONFIG",
    EMBEDDING_WEIGHTS: "EMBEDDING_WEIGHTS",
    EMBEDDING_SCALES: "EMBEDDING_SCALES",
    LAYERS: "LAYERS",
    FINAL_LN: "FINAL_LN",
    PROJECTION: "PROJECTION",
    METADATA: "METADATA",
}
TENSOR_SECTIONS = (EMBEDDING_WEIGHTS, EMBEDDING_SCALES, LAYERS, FINAL_LN, PROJECTION)


def _shape(check: Callable[[Any, Any], bool], text: str) -> Rule:
    return Rule(check, text, SHAPE)


def _with_layers(check: Callable[[Any, Any], bool], text: str) -> Rule:
    """A rule for transformers; the field is ignored in a static model."""
    return _shape(lambda v, h: h["n_layers"] == 0 or check(v, h), text)


def _is_padded_utf8(value: bytes, _: Any) -> bool:
    text = value.rstrip(b"\0")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in text


def _ascend(dims: tuple[int, ...], h: Any) -> bool:
    used = (0, *dims[: h["n_matryoshka"]])
    return all(a < b for a, b in pairwise(used))


def _fit_output(dims: tuple[int, ...], h: Any) -> bool:
    return all(d <= h["output_dim"] for d in dims[: h["n_matryoshka"]])


def _rest_is_zero(dims: tuple[int, ...], h: Any) -> bool:
    return not any(dims[h["n_matryoshka"] :])


_POSITIVE = _shape(lambda v, _: v > 0, "must be at least 1")


@dataclass(frozen=True)
class Header:
    """The 64-byte header (section 3); ``matryoshka_dims`` are its eight values, unused ones 0."""

    magic: bytes = header_field(0, "4s", "magic", Rule(one_of(MAGIC), 'must be "LEMB"'), default=MAGIC)
    format_version: int = header_field(
        4, "H", "format version", Rule(one_of(FORMAT_VERSION), "must be 1"), default=FORMAT_VERSION
    )
    embedding_quant: int = header_field(
        6,
        "B",
        "encoding of the embedding table",
        Rule(in_range(0, 3), "must be 0 (fp32), 1 (int8), 2 (int4) or 3 (ternary)"),
    )
    weight_quant: int = header_field(
        7,
        "B",
        "encoding of the layers' matrices",
        Rule(lambda v, h: h["n_layers"] == 0 or v in (0, 1), "must be 0 (fp32) or 1 (ternary)"),
    )
    vocab_size: int = header_field(8, "I", "vocabulary size", _POSITIVE)
    d_model: int = header_field(
        12, "H", "model width", _POSITIVE, _shape(lambda v, _: v % 4 == 0, "must be a multiple of 4")
    )
    n_layers: int = header_field(14, "B", "transformer layers; 0: static model")
    n_heads: int = header_field(
        15,
        "B",
        "attention heads",
        _with_layers(lambda v, _: v > 0, "must be at least 1"),
        _with_layers(lambda v, h: h["d_model"] % v == 0, "must divide d_model"),
    )
    ffn_dim: int = header_field(
        16,
        "H",
        "FFN width",
        _with_layers(lambda v, _: v > 0, "must be at least 1"),
        _with_layers(lambda v, h: h["weight_quant"] != 1 or v % 4 == 0, "must be a multiple of 4 with ternary weights"),
    )
    output_dim: int = header_field(18, "H", "length of an embedding", _POSITIVE)
    max_seq_len: int = header_field(20, "H", "tokens kept of a text", _POSITIVE)
    n_matryoshka: int = header_field(
        22, "B", "Matryoshka widths in use", Rule(in_range(0, MAX_MATRYOSHKA), f"must be 0 to {MAX_MATRYOSHKA}")
    )
    flags: int = header_field(
        23,
        "B",
        "1 fingerprint, 2 lower-case, 4 strip accents",
        Rule(lambda v, _: not v & ~_KNOWN_FLAGS, "bits 3 to 7 are reserved and must be 0"),
    )
    matryoshka_dims: tuple[int, ...] = header_field(
        24,
        "8H",
        "widths that an embedding may be cut to",
        Rule(_ascend, "must be at least 1 and strictly ascending over the first n_matryoshka entries"),
        Rule(_fit_output, "must be at most output_dim"),
        Rule(_rest_is_zero, "must be 0 after the first n_matryoshka entries"),
        default=(0,) * MAX_MATRYOSHKA,
    )
    license_id: int = header_field(40, "I", "license; 0: unlicensed or development build")
    version_major: int = header_field(44, "B", "model version, major", default=1)
    version_minor: int = header_field(45, "B", "model version, minor")
    version_patch: int = header_field(46, "H", "model version, patch")
    model_id: bytes = header_field(
        48, "16s", "model name", Rule(_is_padded_utf8, "must be UTF-8, padded with NUL bytes"), default=bytes(16)
    )

    @property
    def values(self) -> dict[str, Any]:
        """The layout's values by field name."""
        return {f.name: getattr(self, f.name) for f in LAYOUT.fields}

    @property
    def embedding_encoding(self) -> str:
        return EMBEDDING_QUANTS[self.embedding_quant]

    @property
    def weight_encoding(self) -> str:
        return WEIGHT_QUANTS[self.weight_quant]

    @property
    def dims(self) -> tuple[int, ...]:
        """The widths that an embedding may have, ascending; the last is ``output_dim``."""
        return tuple(sorted({*self.matryoshka_dims[: self.n_matryoshka], self.output_dim}))

    @property
    def has_fingerprint(self) -> bool:
        return bool(self.flags & FLAG_FINGERPRINT)

    @property
    def lower_case(self) -> bool:
        return bool(self.flags & FLAG_LOWER_CASE)

    @property
    def strip_accents(self) -> bool:
        return bool(self.flags & FLAG_STRIP_ACCENTS)

    @property
    def name(self) -> str:
        """``model_id`` as text, as it is in the file (not safe to print)."""
        return self.model_id.rstrip(b"\0").decode("utf-8")

    @property
    def version(self) -> str:
        """The model version, "1.2.0"."""
        return f"{self.version_major}.{self.version_minor}.{self.version_patch}"

    def to_bytes(self) -> bytes:
        return LAYOUT.pack(self.values)

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Header:
        """The header in the first 64 bytes of ``data``, unchecked."""
        return Header(**LAYOUT.unpack(data))


LAYOUT = layout_of(Header, HEADER_BYTES)


def _in_vocab(v: int, values: Any) -> bool:
    return bool(v < values["vocab_size"])


_TOKEN_ID = Rule(_in_vocab, "must be less than vocab_size")


@dataclass(frozen=True)
class TokenizerConfig:
    """Section 2 (TOKENIZER_CONFIG); ``prefix`` marks a piece that continues a word."""

    unk_token_id: int = header_field(0, "I", "unknown word", _TOKEN_ID)
    cls_token_id: int = header_field(4, "I", "start of a text", _TOKEN_ID)
    sep_token_id: int = header_field(8, "I", "end of a text", _TOKEN_ID)
    pad_token_id: int = header_field(12, "I", "padding", _TOKEN_ID)
    mask_token_id: int = header_field(16, "I", "mask", _TOKEN_ID)
    max_input_chars_per_word: int = header_field(20, "H", "longer words are unknown", default=100)
    prefix_len: int = header_field(22, "B", "bytes of the continuing prefix")
    prefix: str = "##"

    @property
    def values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in TOKENIZER_LAYOUT.fields}

    def to_bytes(self) -> bytes:
        prefix = self.prefix.encode()
        return TOKENIZER_LAYOUT.pack({**self.values, "prefix_len": len(prefix)}) + prefix

    @staticmethod
    def from_bytes(data: memoryview) -> TokenizerConfig:
        """The configuration in ``data``, whose length and prefix have been checked."""
        config = TokenizerConfig(**TOKENIZER_LAYOUT.unpack(data))
        return replace(config, prefix=bytes(data[TOKENIZER_LAYOUT.n_bytes :]).decode())


TOKENIZER_LAYOUT = layout_of(TokenizerConfig, 23)


@dataclass(frozen=True)
class TensorSpec:
    """One array of sections 3 to 7: ``offset`` is its place in its section.

    ``encoding`` is "fp32", "int8", "int4" or "ternary"; an ``ignored`` array is written and never looked at.
    """

    name: str
    section: int
    shape: tuple[int, ...]
    encoding: str
    offset: int
    ignored: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the array as it is stored: packed codes share bytes along the last axis."""
        if self.encoding == "fp32":
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // _PER_BYTE[self.encoding])

    @property
    def dtype(self) -> str:
        return {"fp32": "<f4", "int8": "i1"}.get(self.encoding, "u1")

    @property
    def n_bytes(self) -> int:
        return math.prod(self.stored_shape) * (4 if self.encoding == "fp32" else 1)

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes


# A block of LAYERS in file order (section 5.5): name, kind, shape by d_model (d) and ffn_dim (f).
_LAYER_TENSORS: tuple[tuple[str, str, str], ...] = (
    ("ln1.weight", "fp32", "d"),
    ("ln1.bias", "fp32", "d"),
    ("attn.q.weight", "matrix", "dd"),
    ("attn.q.scale", "scale", ""),
    ("attn.k.weight", "matrix", "dd"),
    ("attn.k.scale", "scale", ""),
    ("attn.v.weight", "matrix", "dd"),
    ("attn.v.scale", "scale", ""),
    ("attn.out.weight", "matrix", "dd"),
    ("attn.out.scale", "scale", ""),
    ("attn.out.bias", "fp32", "d"),
    ("ln2.weight", "fp32", "d"),
    ("ln2.bias", "fp32", "d"),
    ("ffn.up.weight", "matrix", "fd"),
    ("ffn.up.scale", "scale", ""),
    ("ffn.up.bias", "fp32", "f"),
    ("ffn.down.weight", "matrix", "df"),
    ("ffn.down.scale", "scale", ""),
    ("ffn.down.bias", "fp32", "d"),
)
MATRICES = tuple(name.removesuffix(".weight") for name, kind, _ in _LAYER_TENSORS if kind == "matrix")


def _section_arrays(header: Header, section: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, kind and shape of each array of a section, in file order."""
    d, out = header.d_model, header.output_dim
    if section == EMBEDDING_WEIGHTS:
        return [("embedding.weight", header.embedding_encoding, (header.vocab_size, d))]
    if section == EMBEDDING_SCALES:
        return [] if header.embedding_quant == 0 else [("embedding.scales", "fp32", (header.vocab_size,))]
    if section == FINAL_LN:
        return [("final_ln.weight", "fp32", (d,)), ("final_ln.bias", "fp32", (d,))]
    if section == PROJECTION:
        return [("projection.weight", "fp32", (out, d)), ("projection.bias", "fp32", (out,))]
    sizes = {"d": d, "f": header.ffn_dim}
    return [
        (f"layers.{layer}.{name}", kind, tuple(sizes[axis] for axis in axes))
        for layer in range(header.n_layers)
        for name, kind, axes in _LAYER_TENSORS
    ]


def section_tensors(header: Header, section: int) -> list[TensorSpec]:
    """The arrays of one of the sections 3 to 7, in file order; empty where the header implies none."""
    specs: list[TensorSpec] = []
    for name, kind, shape in _section_arrays(header, section):
        encoding = kind if kind in EMBEDDING_QUANTS else header.weight_encoding
        # With fp32 matrices the scale is written as 1 and has no meaning.
        ignored = kind == "scale" and encoding == "fp32"
        encoding = "fp32" if kind == "scale" else encoding
        specs.append(TensorSpec(name, section, shape, encoding, specs[-1].end if specs else 0, ignored))
    return specs


def section_bytes(header: Header, section: int) -> int:
    """The length that the header implies for one of the sections 3 to 7."""
    specs = section_tensors(header, section)
    return specs[-1].end if specs else 0


def tensors(header: Header) -> list[TensorSpec]:
    """Every array of a model, section by section."""
    return [spec for section in TENSOR_SECTIONS for spec in section_tensors(header, section)]
