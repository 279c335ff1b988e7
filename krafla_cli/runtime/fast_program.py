"""A model as a program of kernel operations: the forward pass, written once for one position and for many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from krafla_cli.formats.mlb import BLOCK, LAYER_LOCAL_ROPE, LAYER_NO_ROPE
from krafla_cli.formats.mlb_file import MlbFile
from krafla_cli.kernels import operations as ops
from krafla_cli.kernels.native import Native
from krafla_cli.kernels.structs import Struct
from krafla_cli.kernels.team import Call
from krafla_cli.runtime.engine import Float32s, Slot
from krafla_cli.runtime.fast_memory import Buffers, KvCache, RecurrentState

SLOTS: tuple[Slot, ...] = ("attn_in", "attn_out", "ffn_in", "ffn_act", "classifier")


@dataclass(frozen=True)
class Inputs:
    """Inputs of a matrix product: ``values`` [n_positions, channels], which the operation before ``end`` quantized."""

    end: int
    layer: int | None
    slot: Slot
    values: Float32s


@dataclass(frozen=True)
class Memory:
    """What the layers of a model remember, by layer, and the RoPE tables (cos, sin) by kind (local or not)."""

    caches: dict[int, KvCache]
    states: dict[int, RecurrentState]
    rotations: dict[bool, tuple[Float32s, Float32s]]
    taps: dict[int, Float32s]  # lconv transposed, [lin_conv, channels]


def place_of(layer: int | None, slot: Slot) -> int:
    """A number for the inputs of a matrix product, for step.fault."""
    return (0 if layer is None else layer + 1) * len(SLOTS) + SLOTS.index(slot)


def named_place(place: int) -> tuple[int | None, Slot]:
    """The layer and slot of :func:`place_of`."""
    layer, slot = divmod(place, len(SLOTS))
    return (None if layer == 0 else layer - 1), SLOTS[slot]


class Builder:
    """The operations of a model; ``calls`` is the program so far, ``inputs`` what an observer may see in it."""

    def __init__(self, model: MlbFile, buffers: Buffers, one_position: bool) -> None:
        self.model = model
        self.header = model.header
        self.buffers = buffers
        self.one_position = one_position
        self.calls: list[Call] = []
        self.inputs: list[Inputs] = []

    # -----------------------------------------------------------------------------------------------------------------
    # The model

    def body(self, memory: Memory) -> None:
        """From ids to the residual after the last layer."""
        self._embed()
        for layer in range(self.header.n_layers):
            self._norm(layer, "attn_norm", "attn_in", layer)
            if self.header.is_linear(layer):
                self._linear_attention(layer, memory)
            else:
                self._attention(layer, memory)
            self._norm(layer, "ffn_norm", "ffn_in", layer)
            self._feed_forward(layer)

    def classifier(self) -> None:
        """From the residual to logits; where they go is set before each run (see :class:`Classifier`)."""
        h = self.header
        self._norm(None, "final_norm", "classifier", None)
        self._matrix("tok_emb" if h.shared_classifier else "wcls", None)
        if h.final_softcap:
            self._call(ops.SOFT_CAP, ops.CAP, n_cols=h.vocab, cap=h.final_softcap)

    def _embed(self) -> None:
        table = self.model.quantized("tok_emb")
        self._call(
            ops.EMBED_ROWS,
            ops.EMBED,
            q=table.q,
            d=table.d,
            is_f16=self.header.scale_f16,
            is_q4=table.encoding == "q4_0",
            n_cols=self.header.dim,
            scale=self.header.embed_scale or 1.0,
            x=self.buffers.x,
        )

    def _attention(self, layer: int, memory: Memory) -> None:
        h, b = self.header, self.buffers
        for role, y in (("wq", b.q), ("wk", b.k), ("wv", b.v), ("wg", b.z)):
            if role != "wg" or h.attn_gate:
                self._matrix(f"layers.{layer}.{role}", y, barrier=role == ("wg" if h.attn_gate else "wv"))
        cache = memory.caches[layer]
        self._prepare_heads(layer, cache, memory)
        self._attend(layer, cache)
        self._quantize_mixed(layer, h.q_dim, b.z if h.attn_gate else None)
        self._residual(layer, "wo", "post_attn_norm")

    def _prepare_heads(self, layer: int, cache: KvCache, memory: Memory) -> None:
        h, b = self.header, self.buffers
        flags = h.flags_of(layer)
        vectors: dict[str, Any] = {}
        if h.qkv_bias:
            vectors |= {f"{x}_bias": self._vector(layer, f"b{x}") for x in "qkv"}
        if h.qk_norm:
            vectors |= {f"{x}_norm": self._vector(layer, f"{x}_norm") for x in "qk"}
        if not flags & LAYER_NO_ROPE:
            cos, sin = memory.rotations[bool(flags & LAYER_LOCAL_ROPE)]
            vectors |= {"cos": cos, "sin": sin, "rot_dim": h.rot_size}
        self._call(
            ops.PREPARE_HEADS,
            ops.HEADS,
            q=b.q,
            k=b.k,
            v=b.v,
            n_heads=h.n_heads,
            n_kv_heads=h.n_kv_heads,
            head_dim=h.head_size,
            has_bias=h.qkv_bias,
            has_norm=h.qk_norm,
            eps=h.norm_eps,
            keys=cache.keys,
            values=cache.values,
            is_f16=cache.is_f16,
            n_ctx=cache.n_ctx,
            **vectors,
        )

    def _attend(self, layer: int, cache: KvCache) -> None:
        h, b = self.header, self.buffers
        operands: dict[str, Any] = {
            "q": b.q,
            "out": b.mixed,
            "keys": cache.keys,
            "values": cache.values,
            "item_bytes": cache.item_bytes,
            "n_heads": h.n_heads,
            "n_kv_heads": h.n_kv_heads,
            "head_dim": h.head_size,
            "n_ctx": cache.n_ctx,
            "window": h.window_of(layer),
            "scale": h.score_scale,
            "softcap": h.attn_softcap,
            "parts": b.parts,
        }
        self._call(ops.ATTEND["f16" if cache.is_f16 else "f32"], ops.ATTENTION, **operands)
        if self.one_position:
            self._call(ops.MERGE_CHUNKS, ops.ATTENTION, **operands)

    def _linear_attention(self, layer: int, memory: Memory) -> None:
        h, b, state = self.header, self.buffers, memory.states[layer]
        for role, y in (("lqkv", b.channels), ("lz", b.z), ("lb", b.beta), ("la", b.decay)):
            self._matrix(f"layers.{layer}.{role}", y, barrier=role == "la")
        sizes: dict[str, Any] = {
            "n_channels": h.lin_qkv_size,
            "n_k_heads": h.lin_k_heads,
            "n_v_heads": h.lin_v_heads,
            "k_dim": h.lin_k_dim,
        }
        self._call(
            ops.CONVOLVE,
            ops.CONVOLUTION,
            x=b.channels,
            out=b.convolved,
            taps=memory.taps[layer],
            recent=state.recent,
            n_channels=h.lin_qkv_size,
            n_taps=h.lin_conv,
        )
        self._call(
            ops.NORMALIZE_KEYS,
            ops.KEYS,
            x=b.convolved,
            beta=b.beta,
            decay=b.decay,
            dt_bias=self._vector(layer, "dt_bias"),
            a_log=self._vector(layer, "A_log"),
            query_scale=h.lin_k_dim**-0.5,
            **sizes,
        )
        gates: dict[str, Any] = {"beta": b.beta, "decay": b.decay, "memory": state.memory}
        self._call(ops.DELTA_RULE, ops.DELTA, x=b.convolved, out=b.mixed, v_dim=h.lin_v_dim, **gates, **sizes)
        self._call(
            ops.NORM_GATE_HEADS,
            ops.GATED_HEADS,
            x=b.mixed,
            z=b.z,
            weight=self._vector(layer, "lnorm"),
            n_v_heads=h.lin_v_heads,
            v_dim=h.lin_v_dim,
            eps=h.norm_eps,
        )
        self._quantize_mixed(layer, h.lin_v_size, None)
        self._residual(layer, "lout", "post_attn_norm")

    def _feed_forward(self, layer: int) -> None:
        h, b = self.header, self.buffers
        self._matrix(f"layers.{layer}.w1", b.gate, barrier=False)
        self._matrix(f"layers.{layer}.w3", b.up)
        self._call(
            ops.ACTIVATE_QUANTIZE,
            ops.ACTIVATION,
            gate=b.gate,
            up=b.up,
            act=h.act,
            n_cols=h.hidden_dim,
            **self._codes(layer, "ffn_act"),
        )
        self._observe(layer, "ffn_act", b.gate)
        self._residual(layer, "w2", "post_ffn_norm")

    # -----------------------------------------------------------------------------------------------------------------
    # Parts

    def _call(self, native: Native, layout: Struct, barrier: bool = True, **operands: Any) -> None:
        self.calls.append(Call(native, layout.pack(**operands), barrier))

    def _vector(self, layer: int | None, role: str) -> Float32s:
        return self.model.float32(role if layer is None else f"layers.{layer}.{role}")

    def _codes(self, layer: int | None, slot: Slot) -> dict[str, Any]:
        codes = self.buffers.codes
        return {"codes": codes.codes, "dx": codes.dx, "sx": codes.sx, "place": place_of(layer, slot)}

    def _observe(self, layer: int | None, slot: Slot, values: Float32s) -> None:
        self.inputs.append(Inputs(len(self.calls), layer, slot, values))

    def _norm(self, layer: int | None, role: str, slot: Slot, slot_layer: int | None) -> None:
        b = self.buffers
        self._call(
            ops.NORM_QUANTIZE,
            ops.NORM,
            x=b.x,
            weight=self._vector(layer, role),
            out=b.normed,
            n_cols=self.header.dim,
            eps=self.header.norm_eps,
            **self._codes(slot_layer, slot),
        )
        self._observe(slot_layer, slot, b.normed)

    def _quantize_mixed(self, layer: int, n_cols: int, gate: Float32s | None) -> None:
        values = self.buffers.mixed.reshape(-1)[: self.buffers.n_positions * n_cols].reshape(-1, n_cols)
        gated: dict[str, Any] = {} if gate is None else {"gate": gate, "has_gate": 1}
        self._call(ops.GATE_QUANTIZE, ops.GATED, x=values, n_cols=n_cols, **gated, **self._codes(layer, "attn_out"))
        self._observe(layer, "attn_out", values)

    def _matrix(self, name: str, y: Float32s | None, add: bool = False, barrier: bool = True) -> None:
        """y = W x, or y += W x, on the codes made last."""
        matrix = self.model.quantized(name)
        n_rows, n_cols = matrix.shape
        natives = ops.MATVEC if self.one_position else ops.MATMUL
        target = {} if y is None else {"y": y}
        codes = self.buffers.codes
        self._call(
            natives[matrix.encoding],
            ops.MATRIX,
            barrier,
            q=matrix.q,
            d=matrix.d,
            is_f16=self.header.scale_f16,
            n_rows=n_rows,
            n_blocks=n_cols // BLOCK,
            x=codes.codes,
            dx=codes.dx,
            sx=codes.sx,
            add=add,
            **target,
        )

    def _residual(self, layer: int, role: str, post_norm: str) -> None:
        """The residual is increased by W x, normalized first where the model has post norms."""
        b, name = self.buffers, f"layers.{layer}.{role}"
        if not self.header.post_norms:
            self._matrix(name, b.x, add=True)
            return
        self._matrix(name, b.y)
        weight, eps = self._vector(layer, post_norm), self.header.norm_eps
        self._call(ops.NORM_ADD, ops.NORM_SUM, y=b.y, weight=weight, x=b.x, n_cols=self.header.dim, eps=eps)
