"""The LEMB forward pass in NumPy: token ids to embeddings, many texts at once, no padding.

Texts of one batch lie one after the other, sorted by length: linear layers see all tokens as rows, attention sees
groups of texts of equal length. Source: the specification, section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.embed.activations import gelu, layer_norm, normalized, quantize_activations, softmax
from krafla_cli.formats.lemb import LembModel
from krafla_cli.formats.lemb_codes import unpack_int4, unpack_ternary

Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
# x [rows, features] -> codes [rows, features], x_scale [rows, 1]; a parameter so that tests can replay codes.
Quantizer = Callable[[Float32], tuple[Float32, Float32]]

MAX_SCORES = 1 << 22  # attention scores held at once; longer texts are done in slices of their queries
_EXACT_INTEGERS = 1 << 24  # float32 holds every integer up to here


@dataclass(frozen=True)
class Group:
    """``n_texts`` texts of ``n_tokens`` tokens each, in rows start .. start + n_texts * n_tokens."""

    start: int
    n_texts: int
    n_tokens: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.n_texts * self.n_tokens)


def groups_of(lengths: Sequence[int]) -> list[Group]:
    """The runs of equal length in ``lengths``."""
    groups: list[Group] = []
    start = 0
    for n_tokens, run in groupby(lengths):
        groups.append(Group(start, len(list(run)), n_tokens))
        start = groups[-1].rows.stop
    return groups


class Linear:
    """x Wt + bias in float32 (section 6.3, fp32 weights); several matrices of one input are joined."""

    def __init__(self, weights: Sequence[Float32], bias: Float32 | None) -> None:
        self.weight_t = np.ascontiguousarray(np.concatenate(weights).T, np.float32)
        self.bias = None if bias is None else np.ascontiguousarray(bias)

    def __call__(self, x: Float32, quantize: Quantizer) -> Float32:
        y: Float32 = x @ self.weight_t
        if self.bias is not None:
            y += self.bias
        return y


class BitLinear:
    """Section 6.3: quantized activations times ternary weights, bias before the rescale.

    The product is exact in float32 whatever the order of its sum: every partial sum is an integer of at most
    128 x in_features, and the header's u16 sizes keep that below 2^24.
    """

    def __init__(self, codes: Sequence[npt.NDArray[np.int8]], scales: Sequence[np.float32], bias: Float32 | None):
        joined = np.concatenate(codes)
        if 128 * joined.shape[1] >= _EXACT_INTEGERS:
            raise ValueError(f"{joined.shape[1]} input features: sums would not be exact in float32")
        self.weight_t = np.ascontiguousarray(joined.T, np.float32)
        self.bias = None if bias is None else np.ascontiguousarray(bias)
        ends = np.cumsum([len(c) for c in codes]).tolist()
        self.parts = [(slice(end - len(c), end), s) for c, end, s in zip(codes, ends, scales, strict=True)]

    def __call__(self, x: Float32, quantize: Quantizer) -> Float32:
        codes, x_scale = quantize(x)
        y: Float32 = codes @ self.weight_t
        if self.bias is not None:
            y += self.bias
        for part, scale in self.parts:
            y[:, part] /= scale * x_scale
        return y


class Layer:
    """One transformer block (section 6.1)."""

    def __init__(self, model: LembModel, index: int) -> None:
        self.n_heads = model.header.n_heads
        arrays, prefix = model.arrays, f"layers.{index}."
        self.ln1, self.ln2 = (
            tuple(np.ascontiguousarray(arrays[f"{prefix}{name}.{part}"]) for part in ("weight", "bias"))
            for name in ("ln1", "ln2")
        )
        self.qkv = _linear(model, [f"{prefix}attn.{m}" for m in "qkv"])
        self.out = _linear(model, [f"{prefix}attn.out"])
        self.up = _linear(model, [f"{prefix}ffn.up"])
        self.down = _linear(model, [f"{prefix}ffn.down"])

    def __call__(self, x: Float32, groups: Sequence[Group], quantize: Quantizer) -> Float32:
        qkv = self.qkv(layer_norm(x, *self.ln1), quantize)
        x = x + self.out(self._attend(qkv, groups), quantize)
        f = gelu(self.up(layer_norm(x, *self.ln2), quantize))
        x += self.down(f, quantize)
        return x

    def _attend(self, qkv: Float32, groups: Sequence[Group]) -> Float32:
        """softmax(Q Kt / sqrt(d_head)) V per head and text, heads merged: [rows, 3 d] -> [rows, d]."""
        d = qkv.shape[1] // 3
        out = np.empty((len(qkv), d), np.float32)
        for g in groups:
            shape = (g.n_texts, g.n_tokens, 3, self.n_heads, d // self.n_heads)
            q, k, v = qkv[g.rows].reshape(shape).transpose(2, 0, 3, 1, 4)  # each [texts, heads, tokens, d_head]
            merged = out[g.rows].reshape(g.n_texts, g.n_tokens, self.n_heads, -1).transpose(0, 2, 1, 3)
            # Slices of the queries bound the memory of the scores, which grow with the square of the length.
            step = max(1, MAX_SCORES // (g.n_texts * self.n_heads * g.n_tokens))
            for first in range(0, g.n_tokens, step):
                part = slice(first, first + step)
                merged[:, :, part] = _attention(q[:, :, part], k, v)
        return out


def _attention(q: Float32, k: Float32, v: Float32) -> Float32:
    scores: Float32 = q @ k.swapaxes(-1, -2)
    scores /= np.sqrt(np.float32(q.shape[-1]))
    attended: Float32 = softmax(scores) @ v
    return attended


def _linear(model: LembModel, names: Sequence[str]) -> Linear | BitLinear:
    bias = model.arrays.get(f"{names[-1]}.bias")
    weights = [model.arrays[f"{name}.weight"] for name in names]
    if model.header.weight_encoding == "fp32":
        return Linear(weights, bias)
    scales = [np.float32(model.arrays[f"{name}.scale"]) for name in names]
    return BitLinear([unpack_ternary(w) for w in weights], scales, bias)


def embedding_rows(model: LembModel, ids: Ids) -> Float32:
    """The embedding-table rows of ``ids``, dequantized: float32 [len(ids), d_model]."""
    rows = model.arrays["embedding.weight"][ids]
    encoding = model.header.embedding_encoding
    if encoding == "fp32":
        return np.ascontiguousarray(rows)
    unpack: dict[str, Callable[[Any], Any]] = {"int8": lambda r: r, "int4": unpack_int4, "ternary": unpack_ternary}
    values: Float32 = unpack[encoding](rows).astype(np.float32)
    values *= model.arrays["embedding.scales"][ids][:, None]
    return values


class Encoder:
    """A model ready to run: matrices unpacked to float32 once, the embedding table left as it is stored."""

    def __init__(self, model: LembModel) -> None:
        self.model = model
        self.layers = [Layer(model, i) for i in range(model.header.n_layers)]
        names = ("final_ln.weight", "final_ln.bias", "projection.weight", "projection.bias")
        self.ln_weight, self.ln_bias, weight, self.bias = (np.ascontiguousarray(model.arrays[n]) for n in names)
        self.weight_t = np.ascontiguousarray(weight.T)

    def project(self, texts: Sequence[Ids], quantize: Quantizer = quantize_activations) -> Float32:
        """The projected vectors, before they are cut and normalized: float32 [texts, output_dim].

        ``texts`` holds each text's active ids, at least one a text; equal lengths side by side make it fast.
        """
        groups = groups_of([len(ids) for ids in texts])
        x = embedding_rows(self.model, np.concatenate(texts))
        for layer in self.layers:
            x = layer(x, groups, quantize)
        x = layer_norm(x, self.ln_weight, self.ln_bias)
        pooled = np.concatenate([x[g.rows].reshape(g.n_texts, g.n_tokens, -1).mean(axis=1) for g in groups])
        projected: Float32 = pooled @ self.weight_t
        projected += self.bias
        return projected


def cut(projected: Float32, dims: int) -> Float32:
    """Section 6.4: the first ``dims`` values, then normalized."""
    return normalized(projected[:, :dims])
