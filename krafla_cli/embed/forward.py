"""The LEMB forward pass on the CPU's kernels: token ids to embeddings, many texts at once, no padding.

An :class:`Encoder` holds a model's matrices as the kernels read them. A :class:`Runner` has the memory for a batch and
runs it on one thread, as a program of kernel operations; threads run batches side by side, each with a runner of its
own. A text's result has the same bits whatever the batch around it. Source: the specification, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from krafla_cli.formats.lemb import LembModel
from krafla_cli.kernels import text_operations as ops
from krafla_cli.kernels.native import prepare
from krafla_cli.kernels.structs import Words, address
from krafla_cli.kernels.team import MEMBER, RUN, Call, Program, Team, aligned_zeros
from krafla_cli.kernels.text_operations import padded, padded_vector
from krafla_cli.progress import SILENT, Progress

Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
# Is shown the codes + 128, uint8 [tokens, features], and x_scale [tokens] of each quantized input, and may change them.
CodesHook = Callable[[npt.NDArray[np.uint8], Float32], None]

BATCH_TOKENS = 256  # a batch's activations (ffn_dim 1024: 1 MB) stay near the second-level cache


class Buffers:
    """Memory for the activations of up to ``n_tokens`` tokens and as many texts; a row more for vector reads."""

    def __init__(self, model: LembModel, n_tokens: int) -> None:
        h = model.header
        self.n_tokens = n_tokens
        self.d, self.ffn, self.out = padded(h.d_model), padded(h.ffn_dim if h.n_layers else 0), padded(h.output_dim)
        n_rows = -(-n_tokens // ops.ROWS_AT_ONCE) * ops.ROWS_AT_ONCE + 1
        n_layer_rows = n_rows if h.n_layers else 0
        self.x = aligned_zeros((n_rows, self.d), np.float32)
        self.normed = aligned_zeros((n_layer_rows, self.d), np.float32)
        self.qkv = aligned_zeros((n_layer_rows, 3 * self.d), np.float32)
        self.attended = aligned_zeros((n_layer_rows, self.d), np.float32)
        self.hidden = aligned_zeros((n_layer_rows, self.ffn), np.float32)
        self.codes = aligned_zeros((n_layer_rows * max(self.d, self.ffn),), np.uint8)
        self.x_scale = aligned_zeros((n_layer_rows,), np.float32)
        self.pooled = aligned_zeros((n_rows, self.d), np.float32)
        self.projected = aligned_zeros((n_rows, self.out), np.float32)


class Dense:
    """x Wt + bias in float32: the projection, and section 6.3 with fp32 weights."""

    def __init__(self, weight: Float32, bias: Float32 | None) -> None:
        self.stride = padded(len(weight))
        self.n_cols = weight.shape[1]
        self.tiles = ops.dense_tiles(weight, self.stride)
        self.bias = padded_vector(bias, self.stride)

    def call(self, x: Float32, y: Float32, buffers: Buffers, add: bool = False, over_texts: bool = False) -> Call:
        """The operation that sets (or adds to) ``y`` from ``x``, both [rows, any width]."""
        operands = ops.DENSE.pack(
            w=self.tiles,
            n_cols=self.n_cols,
            n_tiles=len(self.tiles),
            bias=self.bias,
            x=x,
            x_stride=_row_stride(x),
            y=y,
            y_stride=_row_stride(y),
            add=add,
            over_texts=over_texts,
        )
        return Call(ops.DENSE_PRODUCT, operands)


class Ternary:
    """Section 6.3: quantized activations times ternary weights, bias before the rescale. The sums are exact."""

    def __init__(self, packed: npt.NDArray[np.uint8], scale: float, bias: Float32 | None) -> None:
        self.stride = padded(len(packed))
        self.n_groups = packed.shape[1]
        self.tiles, self.offset = ops.ternary_tiles(packed, self.stride)
        self.scale = scale
        self.bias = padded_vector(bias, self.stride)

    def call(self, x: Float32, y: Float32, buffers: Buffers, add: bool = False) -> Call:
        """The operation that sets (or adds to) ``y`` from the codes of ``x``."""
        operands = ops.TERNARY.pack(
            q=self.tiles,
            n_groups=self.n_groups,
            n_tiles=len(self.tiles),
            offset=self.offset,
            bias=self.bias,
            scale=self.scale,
            codes=buffers.codes,
            x_stride=_row_stride(x),
            x_scale=buffers.x_scale,
            y=y,
            y_stride=_row_stride(y),
            add=add,
        )
        return Call(ops.TERNARY_PRODUCT, operands)


class Layer:
    """One transformer block (section 6.1)."""

    def __init__(self, model: LembModel, index: int) -> None:
        header, prefix = model.header, f"layers.{index}."
        self.header = header
        self.quantize = header.weight_encoding == "ternary"
        self.ln1, self.ln2 = (_norm(model, f"{prefix}{name}") for name in ("ln1", "ln2"))
        self.q, self.k, self.v, self.out = (_linear(model, f"{prefix}attn.{m}") for m in ("q", "k", "v", "out"))
        self.up, self.down = (_linear(model, f"{prefix}ffn.{m}") for m in ("up", "down"))

    def calls(self, b: Buffers) -> Iterator[Call]:
        """The block's operations on the rows of ``b.x``, in place."""
        d = b.d
        yield self._input(b, ops.NORM, b.x, b.normed, self.ln1)
        for linear, part in zip((self.q, self.k, self.v), (0, d, 2 * d), strict=True):
            yield linear.call(b.normed, b.qkv[:, part : part + d], b)
        yield self._attention(b)
        if self.quantize:
            yield self._input(b, ops.PLAIN, b.attended, b.attended)
        yield self.out.call(b.attended, b.x, b, add=True)
        yield self._input(b, ops.NORM, b.x, b.normed, self.ln2)
        yield self.up.call(b.normed, b.hidden, b)
        yield self._input(b, ops.GELU, b.hidden, b.hidden)
        yield self.down.call(b.hidden, b.x, b, add=True)

    def _input(self, b: Buffers, before: int, x: Float32, out: Float32, norm: Sequence[Float32] = ()) -> Call:
        """What comes before a linear layer, and its codes where weights are ternary."""
        weight_and_bias = dict(zip(("weight", "bias"), norm, strict=bool(norm)))
        operands = ops.INPUT.pack(
            before=before,
            x=x,
            out=out,
            n_cols=self.header.ffn_dim if before == ops.GELU else self.header.d_model,
            stride=_row_stride(x),
            quantize=self.quantize,
            codes=b.codes,
            x_scale=b.x_scale,
            **weight_and_bias,
        )
        return Call(ops.PREPARE, operands)

    def _attention(self, b: Buffers) -> Call:
        head_dim = self.header.d_model // self.header.n_heads
        operands = ops.ATTENTION.pack(
            qkv=b.qkv,
            out=b.attended,
            n_heads=self.header.n_heads,
            head_dim=head_dim,
            stride=b.d,
            scale=1 / math.sqrt(head_dim),
        )
        return Call(ops.ATTEND, operands)


def _norm(model: LembModel, name: str) -> tuple[Float32, Float32]:
    """Weight and bias of a LayerNorm."""
    d = padded(model.header.d_model)
    return padded_vector(model.arrays[f"{name}.weight"], d), padded_vector(model.arrays[f"{name}.bias"], d)


def _linear(model: LembModel, name: str) -> Dense | Ternary:
    weight, bias = model.arrays[f"{name}.weight"], model.arrays.get(f"{name}.bias")
    if model.header.weight_encoding == "fp32":
        return Dense(weight, bias)
    return Ternary(weight, float(model.arrays[f"{name}.scale"]), bias)


def _row_stride(array: Float32) -> int:
    return array.strides[0] // array.itemsize


class Encoder:
    """A model ready to run: matrices laid out for the kernels once, the embedding table left as it is stored."""

    def __init__(self, model: LembModel, progress: Progress = SILENT) -> None:
        self.model = model
        arrays = model.arrays
        self.table = _whole_vectors(arrays["embedding.weight"], model.header.d_model)
        self.scales = np.ascontiguousarray(arrays.get("embedding.scales", np.zeros(0, np.float32)))
        self.layers = [Layer(model, i) for i in range(model.header.n_layers)]
        self.final_norm = _norm(model, "final_ln")
        self.projection = Dense(arrays["projection.weight"], arrays["projection.bias"])
        natives = (RUN, ops.RUN_BATCHES, *(call.native for call in self.calls(Buffers(model, 1))))
        prepare(list(dict.fromkeys(natives)), progress)

    def calls(self, b: Buffers) -> list[Call]:
        """The operations from ``batch.ids`` to ``b.projected`` and ``batch.out``."""
        calls = [self._look_up(b)]
        for layer in self.layers:
            calls += layer.calls(b)
        weight, bias = self.final_norm
        pool = ops.POOLING.pack(
            x=b.x, weight=weight, bias=bias, out=b.pooled, n_cols=self.model.header.d_model, stride=b.d
        )
        projection = self.projection.call(b.pooled, b.projected, b, over_texts=True)
        finish = ops.FINISHING.pack(projected=b.projected, stride=b.out)
        return [*calls, Call(ops.POOL, pool), projection, Call(ops.FINISH, finish)]

    def _look_up(self, b: Buffers) -> Call:
        operands = ops.TABLE.pack(
            encoding=self.model.header.embedding_quant,
            rows=self.table,
            row_bytes=self.model.arrays["embedding.weight"].strides[0],
            scales=self.scales,
            x=b.x,
            n_cols=self.model.header.d_model,
            stride=b.d,
        )
        return Call(ops.LOOK_UP, operands)

    def project(self, texts: Sequence[Ids], on_codes: CodesHook | None = None) -> Float32:
        """The projected vectors, before they are cut and normalized: float32 [texts, output_dim], all in one batch.

        ``texts`` holds each text's active ids, at least one a text, all below vocab_size.
        """
        starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        return Runner(self, int(starts[-1])).run(np.concatenate(texts).astype(np.int64), starts, on_codes).copy()


@dataclass(frozen=True)
class _Stop:
    """Where ``on_codes`` looks: after the first ``end`` operations, at codes [tokens, stride] of n_cols columns."""

    end: int
    n_cols: int
    stride: int


class Runner:
    """The memory and the program for batches of up to ``n_tokens`` tokens; for one thread at a time."""

    def __init__(self, encoder: Encoder, n_tokens: int) -> None:
        header = encoder.model.header
        self.n_tokens = n_tokens
        self.output_dim = header.output_dim
        self._encoder = encoder  # keeps the arrays alive whose addresses are in the operands
        self._buffers = Buffers(encoder.model, n_tokens)
        self._calls = encoder.calls(self._buffers)
        self._program = Program(self._calls)
        head_dim = header.d_model // header.n_heads if header.n_layers else 0
        scratch = max(ops.product_scratch_bytes(n_tokens), ops.attention_scratch_bytes(n_tokens, head_dim))
        self._team = Team(1, scratch)
        # For run_batches: this runner's member of a team of one, its counters and their own address.
        self._scratch = aligned_zeros((scratch,), np.uint8)
        self._member = MEMBER.pack(n_threads=1, scratch=self._scratch)
        self._counters = np.zeros(len(self._calls) + 1, np.int64)
        self._counters[-1] = address(self._counters)
        self._arrived = np.zeros(1, np.int64)

    def run_batches(self, batches: Words, taken: Words) -> None:
        """Runs batches, BATCH structs [n, fields], that no other runner has taken by the counter ``taken`` [1]."""
        table, where = self._program.table, np.array([address(batches)])
        ops.RUN_BATCHES(
            table, len(self._calls), where, len(batches), taken, self._member, self._counters, self._arrived
        )

    def run(self, ids: Ids, starts: Ids, on_codes: CodesHook | None = None) -> Float32:
        """Runs texts that lie in ``ids`` one after the other: text i is ids[starts[i] : starts[i + 1]].

        Returns their projected vectors, float32 [texts, output_dim], which the next run overwrites.
        """
        n_texts, n_tokens = len(starts) - 1, int(starts[-1])
        if n_tokens > self.n_tokens:
            raise ValueError(f"{n_tokens} tokens, there is room for {self.n_tokens}")
        batch = ops.BATCH.pack(n_tokens=n_tokens, n_texts=n_texts, ids=ids, starts=starts)
        if on_codes is None:
            self._team.run(self._program, batch)
        else:
            self._run_with_stops(batch, n_tokens, on_codes)
        return self._buffers.projected[:n_texts, : self.output_dim]

    def _run_with_stops(self, batch: Words, n_tokens: int, on_codes: CodesHook) -> None:
        b, start = self._buffers, 0
        for stop in self._stops():
            self._team.run(self._program, batch, start, stop.end)
            codes = b.codes[: n_tokens * stop.stride].reshape(n_tokens, stop.stride)
            on_codes(codes[:, : stop.n_cols], b.x_scale[:n_tokens])
            start = stop.end
        self._team.run(self._program, batch, start, len(self._calls))

    def _stops(self) -> Iterator[_Stop]:
        quantize, n_cols, stride = (ops.INPUT.index(name) for name in ("quantize", "n_cols", "stride"))
        for i, call in enumerate(self._calls):
            if call.native == ops.PREPARE and call.operands[quantize]:
                yield _Stop(i + 1, int(call.operands[n_cols]), int(call.operands[stride]))


def _whole_vectors(rows: npt.NDArray[np.generic], n_cols: int) -> npt.NDArray[np.generic]:
    """The table as it is, or a copy with room behind it where its last row does not end with a vector of 8 elements."""
    if n_cols % ops.LANES == 0 and rows.flags.c_contiguous:
        return rows
    out = np.zeros(rows.size + ops.LANES, rows.dtype)
    out[: rows.size] = rows.reshape(-1)
    return out


def normalized(vectors: Float32) -> Float32:
    """Each row divided by its length (summed in float64, so that small and large values neither vanish nor overflow).

    A row of zeros, which has no direction, stays zero; one that is not finite does not become finite.
    """
    length = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=-1, keepdims=True))
    unit: Float32 = np.divide(vectors, length, where=length != 0, out=np.zeros(vectors.shape, np.float64))
    return unit.astype(np.float32)


def cut(projected: Float32, dims: int) -> Float32:
    """Section 6.4: the first ``dims`` values, then normalized."""
    return normalized(projected[:, :dims])
