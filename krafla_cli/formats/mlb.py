"""The .mlb model format, version 1: header table, derived values, and the list of a model's tensors.

Everything about bytes follows from two tables here: the fields of :class:`Header`, and the arrays of the body
(``_BEFORE_LAYERS`` to ``_AFTER_LAYERS``). Reading, writing and validating a file are in ``mlb_file.py``.
Source: the .mlb specification, "File formats" and "Body".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from krafla_cli.formats.faults import FORMAT, SHAPE
from krafla_cli.formats.layout import Check, Field, Layout, Rule, in_range, is_finite, one_of

MAGIC = b"MLB1"
VERSION = 1
HEADER_BYTES = 256
ALIGNMENT = 64
BLOCK = 32  # weights that share one scale

MAX_DIM = 65536
MAX_VOCAB = MAX_SEQ = MAX_WINDOW = 1 << 24

WTYPE_Q8_0, WTYPE_Q4_0 = 1, 2
ROPE_PLAIN, ROPE_LLAMA3, ROPE_LINEAR, ROPE_YARN = 0, 1, 2, 3
ACT_SILU, ACT_GELU_TANH = 0, 1

# Layer flag bits.
LAYER_WINDOW, LAYER_LOCAL_ROPE, LAYER_NO_ROPE, LAYER_LINEAR = 1, 2, 4, 8

# Bits of q8_mask by the name of the matrix class (and of `mlb convert --q8-classes`).
Q8_CLASSES = {"tok_emb": 1, "wcls": 2, "qk": 4, "v": 8, "o": 16, "gate_up": 32, "down": 64}


def _entry(offset: int, code: str, meaning: str, *rules: Rule, default: Any = 0) -> Any:
    return dataclasses.field(
        default=default, metadata={"offset": offset, "code": code, "text": meaning, "rules": rules}
    )


def _shape(check: Check, text: str) -> Rule:
    return Rule(check, text, SHAPE)


def _format(check: Check, text: str) -> Rule:
    return Rule(check, text, FORMAT)


def _size(limit: int = MAX_DIM, least: int = 1) -> Rule:
    return _shape(in_range(least, limit), f"must be {least} to {limit}")


def _multiple_of(n: int) -> Rule:
    return _shape(lambda v, _: v % n == 0, f"must be a multiple of {n}")


def _divides_heads(n_kv_heads: int, values: Any) -> bool:
    return n_kv_heads == 0 or values["n_heads"] % n_kv_heads == 0


def _head_dim_of(values: Any) -> int:
    n_heads = values["n_heads"]
    return int(values["head_dim"] or (values["dim"] // n_heads if n_heads else 0))


def _for_rope(types: tuple[int, ...], check: Check, text: str) -> Rule:
    return _format(lambda v, values: values["rope_type"] not in types or check(v, values), text)


def _for_linear(check: Check, text: str) -> Rule:
    """A rule for models with linear attention; lin_k_heads tells them."""
    return _shape(lambda v, values: values["lin_k_heads"] == 0 or check(v, values), text)


_FINITE = _format(is_finite, "must be finite")
_FLAG = _format(one_of(0, 1), "must be 0 or 1")
_NOT_NEGATIVE = _format(lambda v, _: v >= 0, "must be >= 0")
_POSITIVE = _format(lambda v, _: v > 0, "must be > 0")
_LIN_SIZE = _for_linear(in_range(1, MAX_DIM), f"must be 1 to {MAX_DIM} in a model with linear attention")
_LIN_UNUSED = _shape(lambda v, h: h["lin_k_heads"] != 0 or v == 0, "must be 0 while lin_k_heads is 0")


@dataclass(frozen=True)
class Header:
    """The 256-byte header. Each field's metadata is its row in the specification's table: offset, type, rules.

    ``flags`` is the layer-flags array of the body, n_layers bytes (empty when ``layer_flags`` is 0): the list of
    tensors depends on it.
    """

    magic: bytes = _entry(0, "4s", "magic", _format(one_of(MAGIC), 'must be "MLB1"'), default=MAGIC)
    version: int = _entry(4, "I", "format version", _format(one_of(VERSION), "must be 1"), default=VERSION)
    dim: int = _entry(8, "I", "model width", _size(), _multiple_of(BLOCK))
    n_layers: int = _entry(12, "I", "layers", _size())
    n_heads: int = _entry(
        16,
        "I",
        "query heads",
        _size(),
        _shape(lambda v, h: h["head_dim"] != 0 or h["dim"] % v == 0, "must divide dim while head_dim is 0"),
        _shape(lambda v, h: h["head_dim"] != 0 or (h["dim"] // v) % 2 == 0, "must leave dim / n_heads even"),
        _shape(lambda v, h: _head_dim_of(h) * v <= MAX_DIM, f"q_dim (head_dim x n_heads) must be at most {MAX_DIM}"),
        _shape(lambda v, h: _head_dim_of(h) * v % BLOCK == 0, "q_dim (head_dim x n_heads) must be a multiple of 32"),
    )
    n_kv_heads: int = _entry(20, "I", "key/value heads", _size(), _shape(_divides_heads, "must divide n_heads"))
    hidden_dim: int = _entry(24, "I", "FFN width", _size(), _multiple_of(BLOCK))
    vocab: int = _entry(28, "I", "vocabulary size", _size(MAX_VOCAB, least=3))
    max_seq: int = _entry(32, "I", "longest context in positions", _size(MAX_SEQ))
    rope_theta: float = _entry(
        36,
        "f",
        "RoPE base",
        _FINITE,
        _POSITIVE,
        # The ramp of yarn divides by its logarithm.
        _for_rope((ROPE_YARN,), lambda v, _: v != 1, "must not be 1 with yarn"),
        default=10000.0,
    )
    norm_eps: float = _entry(40, "f", "RMSNorm epsilon", _FINITE, _NOT_NEGATIVE, default=1e-5)
    wtype: int = _entry(44, "I", "weight type: 1 Q8_0, 2 Q4_0", _format(one_of(1, 2), "must be 1 (Q8_0) or 2 (Q4_0)"))
    shared_classifier: int = _entry(48, "I", "non-zero: tok_emb is the classifier too")
    rope_type: int = _entry(
        52, "I", "RoPE scaling: 0 none, 1 llama3, 2 linear, 3 yarn", _format(one_of(0, 1, 2, 3), "must be 0 to 3")
    )
    rope_factor: float = _entry(
        56, "f", "RoPE scaling factor", _FINITE, _for_rope((1, 2, 3), lambda v, _: v > 0, "must be > 0"), default=0.0
    )
    rope_low_freq_factor: float = _entry(
        60,
        "f",
        "llama3: low_freq_factor; yarn: beta_fast",
        _FINITE,
        _for_rope((ROPE_LLAMA3,), lambda v, _: v > 0, "must be > 0"),
        default=0.0,
    )
    rope_high_freq_factor: float = _entry(
        64,
        "f",
        "llama3: high_freq_factor; yarn: beta_slow",
        _FINITE,
        _for_rope((ROPE_LLAMA3,), lambda v, h: v > h["rope_low_freq_factor"], "must be > rope_low_freq_factor"),
        _for_rope((ROPE_YARN,), lambda v, h: 0 < v < h["rope_low_freq_factor"], "must be > 0 and < beta_fast"),
        default=0.0,
    )
    rope_orig_max_seq: int = _entry(
        68, "I", "original context of llama3, yarn", _for_rope((1, 3), lambda v, _: v > 0, "must be > 0")
    )
    q8_mask: int = _entry(
        72,
        "I",
        "matrix classes stored as Q8_0 in a Q4_0 model",
        _format(in_range(0, 127), "must be 0 to 127"),
        _format(lambda v, h: v == 0 or h["wtype"] != WTYPE_Q8_0, "must be 0 in a Q8_0 model"),
    )
    qkv_bias: int = _entry(76, "I", "q, k, v projections have biases", _FLAG)
    head_dim: int = _entry(
        80,
        "I",
        "head size; 0: dim / n_heads",
        _size(least=0),
        _shape(lambda v, _: v % 2 == 0, "must be even"),
    )
    qk_norm: int = _entry(84, "I", "RMSNorm of each query and key head before RoPE", _FLAG)
    rope_attn_factor: float = _entry(
        88,
        "f",
        "factor on cos and sin (yarn)",
        _FINITE,
        _format(lambda v, h: v == 0 or h["rope_type"] == ROPE_YARN, "must be 0 without yarn"),
        _for_rope((ROPE_YARN,), lambda v, _: v > 0, "must be > 0 with yarn"),
        default=0.0,
    )
    sliding_window: int = _entry(
        92, "I", "positions that a position attends to; 0: all", _format(in_range(0, MAX_WINDOW), "must be <= 2^24")
    )
    layer_flags: int = _entry(96, "I", "a byte of flags per layer follows the header", _FLAG)
    rope_local_theta: float = _entry(
        100, "f", "RoPE base of the layers flagged for it", _FINITE, _NOT_NEGATIVE, default=0.0
    )
    act: int = _entry(104, "I", "FFN activation: 0 SiLU, 1 GELU (tanh)", _format(one_of(0, 1), "must be 0 or 1"))
    post_norms: int = _entry(108, "I", "attention and FFN outputs are normalized", _FLAG)
    embed_scale: float = _entry(112, "f", "factor on embedding rows; 0: 1", _FINITE, _NOT_NEGATIVE, default=0.0)
    attn_scale: float = _entry(
        116, "f", "attention score factor; 0: 1/sqrt(head_dim)", _FINITE, _NOT_NEGATIVE, default=0.0
    )
    scale_f16: int = _entry(120, "I", "scales are f16 instead of f32", _FLAG)
    attn_softcap: float = _entry(124, "f", "soft cap of attention scores; 0: none", _FINITE, _NOT_NEGATIVE, default=0.0)
    final_softcap: float = _entry(128, "f", "soft cap of logits; 0: none", _FINITE, _NOT_NEGATIVE, default=0.0)
    rot_dim: int = _entry(
        132,
        "I",
        "dimensions of a head that RoPE rotates; 0: all",
        _shape(lambda v, _: v % 2 == 0, "must be even"),
        _shape(lambda v, h: v <= _head_dim_of(h), "must be at most head_dim"),
    )
    attn_gate: int = _entry(136, "I", "attention output is multiplied by sigmoid(wg x)", _FLAG)
    lin_k_heads: int = _entry(140, "I", "linear attention: key heads; 0: none", _size(least=0))
    lin_v_heads: int = _entry(
        144,
        "I",
        "linear attention: value heads",
        _LIN_UNUSED,
        _LIN_SIZE,
        _for_linear(lambda v, h: v % h["lin_k_heads"] == 0, "must be a multiple of lin_k_heads"),
        _for_linear(lambda v, _: v % 4 == 0, "must be a multiple of 4"),
    )
    lin_k_dim: int = _entry(
        148,
        "I",
        "linear attention: size of a key head",
        _LIN_UNUSED,
        _LIN_SIZE,
        _for_linear(lambda v, h: v * h["lin_k_heads"] <= MAX_DIM, f"lin_k_heads x lin_k_dim must be <= {MAX_DIM}"),
    )
    lin_v_dim: int = _entry(
        152,
        "I",
        "linear attention: size of a value head",
        _LIN_UNUSED,
        _LIN_SIZE,
        _for_linear(lambda v, h: v * h["lin_v_heads"] % BLOCK == 0, "lin_v_heads x lin_v_dim must divide by 32"),
        _for_linear(lambda v, h: v * h["lin_v_heads"] <= MAX_DIM, f"lin_v_heads x lin_v_dim must be <= {MAX_DIM}"),
    )
    lin_conv: int = _entry(156, "I", "linear attention: taps of the convolution", _LIN_UNUSED, _LIN_SIZE)
    flags: bytes = b""

    @property
    def values(self) -> dict[str, Any]:
        """The layout's values by field name."""
        return {f.name: getattr(self, f.name) for f in LAYOUT.fields}

    @property
    def head_size(self) -> int:
        """Size of a head: ``head_dim``, or dim / n_heads where that is 0."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def q_dim(self) -> int:
        return self.head_size * self.n_heads

    @property
    def kv_dim(self) -> int:
        return self.head_size * self.n_kv_heads

    @property
    def rot_size(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return self.rot_dim or self.head_size

    @property
    def score_scale(self) -> float:
        """Factor on attention scores."""
        return self.attn_scale or self.head_size**-0.5

    @property
    def lin_v_size(self) -> int:
        """Channels of all value heads of a linear-attention layer (V x dv)."""
        return self.lin_v_heads * self.lin_v_dim

    @property
    def lin_qkv_size(self) -> int:
        """Channels of queries, keys and values of a linear-attention layer (2 x K x dk + V x dv)."""
        return 2 * self.lin_k_heads * self.lin_k_dim + self.lin_v_size

    def flags_of(self, layer: int) -> int:
        """The flag byte of ``layer``. Without layer flags, the window (if any) applies to every layer."""
        return self.flags[layer] if self.layer_flags else LAYER_WINDOW

    def is_linear(self, layer: int) -> bool:
        return bool(self.flags_of(layer) & LAYER_LINEAR)

    def window_of(self, layer: int) -> int:
        """Positions that ``layer`` attends to; 0 means all."""
        return self.sliding_window if self.flags_of(layer) & LAYER_WINDOW else 0

    def to_bytes(self) -> bytes:
        """The 256 bytes of the header (the flags array is part of the body)."""
        return LAYOUT.pack(self.values)

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Header:
        """The header in the first 256 bytes of ``data``, unchecked, without the flags."""
        return Header(**LAYOUT.unpack(data))


def _layout_of_header() -> Layout:
    rows = [(f.name, f.metadata) for f in dataclasses.fields(Header) if f.metadata]
    fields = tuple(Field(name, m["offset"], m["code"], m["text"], m["rules"]) for name, m in rows)
    return Layout(HEADER_BYTES, fields)


LAYOUT = _layout_of_header()


def encode_meaning(name: str, value: Any) -> str:
    """What a header value stands for, for people: wtype 2 -> "Q4_0"; empty where the number says it all."""
    names: dict[str, dict[int, str]] = {
        "wtype": {1: "Q8_0", 2: "Q4_0"},
        "rope_type": {0: "plain", 1: "llama3", 2: "linear", 3: "yarn"},
        "act": {0: "SiLU", 1: "GELU (tanh)"},
    }
    if name == "q8_mask":
        return " + ".join(c for c, bit in Q8_CLASSES.items() if value & bit)
    return names.get(name, {}).get(value, "")


# ---------------------------------------------------------------------------------------------------------------------
# The body: arrays in file order, as data.


@dataclass(frozen=True)
class _Array:
    """One tensor of the body: its shape and whether it is present follow from the header.

    ``kind``: "u8", "f32", "q8_0" (always), or the matrix class that decides between Q8_0 and the wtype.
    """

    role: str
    kind: str
    shape: Callable[[Header], tuple[int, ...]]
    present: Callable[[Header], bool] = lambda _: True


_BEFORE_LAYERS = (
    _Array("layer_flags", "u8", lambda h: (h.n_layers,), lambda h: bool(h.layer_flags)),
    _Array("tok_emb", "tok_emb", lambda h: (h.vocab, h.dim)),
)
_ATTENTION = (
    _Array("attn_norm", "f32", lambda h: (h.dim,)),
    _Array("wq", "qk", lambda h: (h.q_dim, h.dim)),
    _Array("wk", "qk", lambda h: (h.kv_dim, h.dim)),
    _Array("wv", "v", lambda h: (h.kv_dim, h.dim)),
    _Array("wo", "o", lambda h: (h.dim, h.q_dim)),
    _Array("wg", "qk", lambda h: (h.q_dim, h.dim), lambda h: bool(h.attn_gate)),
    _Array("bq", "f32", lambda h: (h.q_dim,), lambda h: bool(h.qkv_bias)),
    _Array("bk", "f32", lambda h: (h.kv_dim,), lambda h: bool(h.qkv_bias)),
    _Array("bv", "f32", lambda h: (h.kv_dim,), lambda h: bool(h.qkv_bias)),
    _Array("q_norm", "f32", lambda h: (h.head_size,), lambda h: bool(h.qk_norm)),
    _Array("k_norm", "f32", lambda h: (h.head_size,), lambda h: bool(h.qk_norm)),
)
_LINEAR_ATTENTION = (
    _Array("attn_norm", "f32", lambda h: (h.dim,)),
    _Array("lqkv", "qk", lambda h: (h.lin_qkv_size, h.dim)),
    _Array("lz", "v", lambda h: (h.lin_v_size, h.dim)),
    _Array("lb", "q8_0", lambda h: (h.lin_v_heads, h.dim)),
    _Array("la", "q8_0", lambda h: (h.lin_v_heads, h.dim)),
    _Array("lconv", "f32", lambda h: (h.lin_qkv_size, h.lin_conv)),
    _Array("dt_bias", "f32", lambda h: (h.lin_v_heads,)),
    _Array("A_log", "f32", lambda h: (h.lin_v_heads,)),
    _Array("lnorm", "f32", lambda h: (h.lin_v_dim,)),
    _Array("lout", "o", lambda h: (h.dim, h.lin_v_size)),
)
_FFN = (
    _Array("ffn_norm", "f32", lambda h: (h.dim,)),
    _Array("w1", "gate_up", lambda h: (h.hidden_dim, h.dim)),
    _Array("w2", "down", lambda h: (h.dim, h.hidden_dim)),
    _Array("w3", "gate_up", lambda h: (h.hidden_dim, h.dim)),
    _Array("post_attn_norm", "f32", lambda h: (h.dim,), lambda h: bool(h.post_norms)),
    _Array("post_ffn_norm", "f32", lambda h: (h.dim,), lambda h: bool(h.post_norms)),
)
_AFTER_LAYERS = (
    _Array("final_norm", "f32", lambda h: (h.dim,)),
    _Array("wcls", "wcls", lambda h: (h.vocab, h.dim), lambda h: not h.shared_classifier),
)

MATRIX_CLASS = {
    a.role: a.kind
    for a in (*_BEFORE_LAYERS, *_ATTENTION, *_LINEAR_ATTENTION, *_FFN, *_AFTER_LAYERS)
    if a.kind in Q8_CLASSES
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file: what it is and where its bytes are.

    ``encoding`` is "u8", "f32", "q8_0" or "q4_0". A quantized tensor is two arrays: the quants at ``offset``
    (``n_bytes``) and the scales at ``scale_offset`` (``scale_bytes``; one per 32 weights of a row).
    """

    name: str
    role: str
    layer: int | None
    shape: tuple[int, ...]
    encoding: str
    offset: int
    n_bytes: int
    scale_offset: int = 0
    scale_bytes: int = 0

    @property
    def is_quantized(self) -> bool:
        return self.encoding in ("q8_0", "q4_0")

    @property
    def n_weights(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def end(self) -> int:
        """Offset just after the last byte, without padding."""
        return self.scale_offset + self.scale_bytes if self.is_quantized else self.offset + self.n_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of quants and scales, without padding."""
        return self.n_bytes + self.scale_bytes

    def moved(self, by: int, layer: int) -> TensorSpec:
        """The same tensor in ``layer``, ``by`` bytes further on."""
        scale_offset = self.scale_offset + by if self.is_quantized else 0
        name = f"layers.{layer}.{self.role}"
        return dataclasses.replace(self, name=name, layer=layer, offset=self.offset + by, scale_offset=scale_offset)


def aligned(offset: int) -> int:
    """``offset`` rounded up to the next multiple of 64."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def encoding_of(header: Header, kind: str) -> str:
    """The encoding of an array of ``kind``: as it is, or for a matrix class Q8_0 or Q4_0 by wtype and q8_mask."""
    if kind not in Q8_CLASSES:
        return kind
    bits = Q8_CLASSES[kind]
    if kind == "tok_emb" and header.shared_classifier:
        bits |= Q8_CLASSES["wcls"]
    return "q8_0" if header.wtype == WTYPE_Q8_0 or header.q8_mask & bits else "q4_0"


def _spec(header: Header, array: _Array, offset: int) -> TensorSpec:
    shape = array.shape(header)
    n = 1
    for size in shape:
        n *= size
    encoding = encoding_of(header, array.kind)
    if encoding in ("u8", "f32"):
        return TensorSpec(array.role, array.role, None, shape, encoding, offset, n * (4 if encoding == "f32" else 1))
    n_bytes = n if encoding == "q8_0" else n // 2
    scale_bytes = n // BLOCK * (2 if header.scale_f16 else 4)
    return TensorSpec(
        array.role, array.role, None, shape, encoding, offset, n_bytes, aligned(offset + n_bytes), scale_bytes
    )


class BodyPlan:
    """Sizes and offsets of the body by arithmetic: one attention and one linear layer are laid out, the rest counted.

    This way a header that implies a huge body costs nothing before its size is compared with the file.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.before = self._lay_out(_BEFORE_LAYERS, HEADER_BYTES)
        self.attention = self._lay_out((*_ATTENTION, *_FFN), 0)
        self.linear = self._lay_out((*_LINEAR_ATTENTION, *_FFN), 0) if header.lin_k_heads else []
        self.layers_offset = self._padded_end(self.before)
        n_linear = sum(header.is_linear(i) for i in range(header.n_layers)) if header.layer_flags else 0
        layer_bytes = (header.n_layers - n_linear) * self._padded_end(self.attention)
        layer_bytes += n_linear * (self._padded_end(self.linear) if self.linear else 0)
        self.after = self._lay_out(_AFTER_LAYERS, self.layers_offset + layer_bytes)

    @property
    def end(self) -> int:
        """Offset just after the last array, without its (optional) padding."""
        return self.after[-1].end

    def _lay_out(self, arrays: tuple[_Array, ...], offset: int) -> list[TensorSpec]:
        specs = []
        for array in arrays:
            if array.present(self.header):
                specs.append(_spec(self.header, array, offset))
                offset = aligned(specs[-1].end)
        return specs

    @staticmethod
    def _padded_end(specs: list[TensorSpec]) -> int:
        return aligned(specs[-1].end)

    def specs(self) -> Iterator[TensorSpec]:
        """All tensors in file order."""
        yield from self.before
        offset = self.layers_offset
        for layer in range(self.header.n_layers):
            of_layer = self.linear if self.header.is_linear(layer) else self.attention
            for spec in of_layer:
                yield spec.moved(offset, layer)
            offset += self._padded_end(of_layer)
        yield from self.after


def tensors(header: Header) -> list[TensorSpec]:
    """Every tensor of a model in file order, with its place in the file; ``header.flags`` must be filled in."""
    return list(BodyPlan(header).specs())
