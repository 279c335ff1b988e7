"""The reference engine: torch on any device, written to be read beside the .mlb specification.

Every operation is one or two lines of torch, on dequantized weights ("f32" activations) or with the specification's
activation quantizer before every matrix product ("q8"). It is the oracle for the fast engine, not fast itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from krafla_cli.errors import DataError, UsageError
from krafla_cli.formats.mlb import ACT_GELU_TANH, LAYER_LOCAL_ROPE, LAYER_NO_ROPE
from krafla_cli.formats.mlb_file import MlbFile
from krafla_cli.progress import Progress
from krafla_cli.quant.blocks import Quantized, WeightError
from krafla_cli.quant.q8_0 import quantize_activations
from krafla_cli.rope import rotation_tables
from krafla_cli.runtime.engine import Engine, EngineOptions, Float32s, Ids, LogitsWanted, Slot
from krafla_cli.runtime.reference_delta import DeltaRule, DeltaState
from krafla_cli.runtime.reference_weights import Codes, Inputs, Weights, load_weights
from krafla_cli.runtime.weights import FileWeights, WeightSource

KV_TYPES = {"f16": torch.float16, "f32": torch.float32}
WEIGHT_TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
# What turns the inputs [T, cols] of a matrix product into codes, given their layer and slot.
ActivationQuantizer: TypeAlias = Callable[[int | None, Slot, Float32s], Quantized]


def open_engine(model: MlbFile, options: EngineOptions, progress: Progress) -> Engine:
    """The reference engine running ``model``; f32 activations and an f32 cache unless ``options`` say otherwise."""
    return open_source(FileWeights(model), options, progress)


def open_source(source: WeightSource, options: EngineOptions, progress: Progress) -> Engine:
    """The same on weights that may come from elsewhere than a .mlb."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return ReferenceEngine(source, options, progress)


class ReferenceEngine(Engine):
    """See :class:`~krafla_cli.runtime.engine.Engine`. All hidden values are float32 [T, channels]."""

    name = "reference"

    def __init__(self, source: WeightSource, options: EngineOptions, progress: Progress) -> None:
        super().__init__(source.header, options.n_ctx)
        self.activations = options.activations or "f32"
        self.kv = options.kv or "f32"
        self.device = _device(options.device)
        self.quantize_inputs: ActivationQuantizer = _quantize_inputs
        self._source = source
        self.dtype = self._dtype(options.dtype)
        self._outside, self._layers = load_weights(source, self.dtype, self.device, progress)
        self._rotations = {local: self._rotation(local) for local in self._rope_kinds()}
        self._cache = {i: self._new_cache() for i in range(self.header.n_layers) if not self.header.is_linear(i)}
        self._delta_rule = DeltaRule(self.header)
        self._clear_state()

    def _dtype(self, chosen: str | None) -> torch.dtype | None:
        """The type of dequantized weights: float32 on a CPU, elsewhere half of it. None for quantized activations."""
        if self.activations == "q8":
            if chosen is not None:
                raise UsageError("--dtype is for --activations f32; quantized ones multiply the quantized weights")
            return None
        if chosen is not None:
            return WEIGHT_TYPES[chosen]
        if self.device.type == "cpu":
            return torch.float32
        has_bf16 = self.device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bf16 else torch.float16

    # -----------------------------------------------------------------------------------------------------------------
    # The model, from ids to logits

    @torch.inference_mode()
    def _forward(self, ids: Ids, logits: LogitsWanted) -> Float32s:
        x = self._embed(ids)
        for layer, weights in enumerate(self._layers):
            mixer = self._linear_attention if self.header.is_linear(layer) else self._attention
            x = x + self._post_norm(
                mixer(layer, weights, self._norm(x, weights, "attn_norm")), weights, "post_attn_norm"
            )
            x = x + self._post_norm(
                self._ffn(layer, weights, self._norm(x, weights, "ffn_norm")), weights, "post_ffn_norm"
            )
        wanted = {"none": x[:0], "last": x[-1:], "all": x}[logits]
        return self._classify(wanted)

    def _embed(self, ids: Ids) -> Tensor:
        return torch.from_numpy(self._source.rows("tok_emb", ids)).to(self.device) * (self.header.embed_scale or 1.0)

    def _classify(self, x: Tensor) -> Float32s:
        if not len(x):
            return torch.empty(0, self.header.vocab).numpy()
        inputs = self._inputs(None, "classifier", self._norm(x, self._outside, "final_norm"))
        role = "tok_emb" if self.header.shared_classifier else "wcls"
        logits = self._outside.matrices[role].product(inputs)
        return _soft_cap(logits, self.header.final_softcap).cpu().numpy()

    def _ffn(self, layer: int, weights: Weights, x: Tensor) -> Tensor:
        inputs = self._inputs(layer, "ffn_in", x)
        gate = weights.matrices["w1"].product(inputs)
        gate = F.gelu(gate, approximate="tanh") if self.header.act == ACT_GELU_TANH else F.silu(gate)
        activated = gate * weights.matrices["w3"].product(inputs)
        return weights.matrices["w2"].product(self._inputs(layer, "ffn_act", activated))

    def _attention(self, layer: int, weights: Weights, x: Tensor) -> Tensor:
        inputs = self._inputs(layer, "attn_in", x)
        q, k, v = (self._heads(weights, inputs, name) for name in "qkv")
        q, k = self._rotate(layer, q), self._rotate(layer, k)
        out = self._attend(layer, q, *self._cached(layer, k, v))
        if self.header.attn_gate:
            out = out * torch.sigmoid(weights.matrices["wg"].product(inputs))
        return weights.matrices["wo"].product(self._inputs(layer, "attn_out", out))

    def _heads(self, weights: Weights, inputs: Inputs, name: str) -> Tensor:
        """Queries, keys or values [T, heads, head_dim], with bias and per-head norm where the model has them."""
        projected = weights.matrices[f"w{name}"].product(inputs)
        if self.header.qkv_bias:
            projected = projected + weights.vectors[f"b{name}"]
        heads = projected.view(len(projected), -1, self.header.head_size)
        return self._norm(heads, weights, f"{name}_norm") if f"{name}_norm" in weights.vectors else heads

    def _attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of queries [T, heads, head_dim] over all positions so far [S, KV heads, head_dim]: [T, q_dim]."""
        grouped = q.view(len(q), self.header.n_kv_heads, -1, self.header.head_size)
        scores = torch.einsum("tkgd,skd->kgts", grouped, keys) * self.header.score_scale
        scores = _soft_cap(scores, self.header.attn_softcap)
        scores = scores.masked_fill(~self._visible(layer, len(q)), -torch.inf)
        return torch.einsum("kgts,skd->tkgd", scores.softmax(-1), values).flatten(1)

    def _visible(self, layer: int, n: int) -> Tensor:
        """Which positions [n, position + n] each new position attends to: itself, those before, inside the window."""
        at = torch.arange(self.position, self.position + n, device=self.device)[:, None]
        other = torch.arange(self.position + n, device=self.device)
        window = self.header.window_of(layer)
        return (other <= at) & (other > at - window) if window else other <= at

    def _rotate(self, layer: int, heads: Tensor) -> Tensor:
        """RoPE on interleaved pairs (2i, 2i + 1) of the first rot_dim dimensions of [T, heads, head_dim]."""
        flags = self.header.flags_of(layer)
        if flags & LAYER_NO_ROPE:
            return heads
        cos, sin = (t[self.position : self.position + len(heads), None] for t in self._rotations[_is_local(flags)])
        size = self.header.rot_size
        even, odd = heads[..., 0:size:2], heads[..., 1:size:2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
        return torch.cat((turned, heads[..., size:]), dim=-1)

    def _linear_attention(self, layer: int, weights: Weights, x: Tensor) -> Tensor:
        inputs = self._inputs(layer, "attn_in", x)
        out = self._delta_rule.run(self._states[layer], weights, inputs)
        z = weights.matrices["lz"].product(inputs)
        normed = self._norm(out, weights, "lnorm").flatten(1) * F.silu(z)
        return weights.matrices["lout"].product(self._inputs(layer, "attn_out", normed))

    # -----------------------------------------------------------------------------------------------------------------
    # Parts

    def _norm(self, x: Tensor, weights: Weights, role: str) -> Tensor:
        """RMSNorm over the last dimension."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.header.norm_eps) * weights.vectors[role]

    def _post_norm(self, x: Tensor, weights: Weights, role: str) -> Tensor:
        return self._norm(x, weights, role) if self.header.post_norms else x

    def _inputs(self, layer: int | None, slot: Slot, x: Tensor) -> Inputs:
        """``x`` [T, channels] as inputs of a matrix product: shown to the observer, then quantized for "q8"."""
        if self.observer is not None:
            self.observer(layer, slot, x.cpu().numpy())
        if self.activations == "f32":
            return x
        codes = self.quantize_inputs(layer, slot, x.cpu().numpy())
        return Codes.of(codes.q, codes.d, self.device)

    def _cached(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new keys and values; returns all of the sequence, float32 [S, KV heads, head_dim]."""
        end = self.position + len(k)
        both = self._cache[layer]
        both[0, self.position : end], both[1, self.position : end] = k, v
        keys, values = both[:, :end].float()
        return keys, values

    def _new_cache(self) -> Tensor:
        shape = (2, self.n_ctx, self.header.n_kv_heads, self.header.head_size)
        return torch.zeros(shape, dtype=KV_TYPES[self.kv], device=self.device)

    def _rope_kinds(self) -> set[bool]:
        """The kinds of RoPE that the model's attention layers use: local (True), the usual one (False)."""
        flags = [self.header.flags_of(i) for i in range(self.header.n_layers) if not self.header.is_linear(i)]
        return {_is_local(f) for f in flags if not f & LAYER_NO_ROPE}

    def _rotation(self, local: bool) -> tuple[Tensor, Tensor]:
        cos, sin = rotation_tables(self.header, self.n_ctx, local)
        return torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device)

    # -----------------------------------------------------------------------------------------------------------------
    # The recurrent state

    def _copy_state(self) -> dict[int, DeltaState]:
        return {layer: state.copy() for layer, state in self._states.items()}

    def _set_state(self, state: dict[int, DeltaState]) -> None:
        self._states = {layer: saved.copy() for layer, saved in state.items()}

    def _clear_state(self) -> None:
        linear = [layer for layer in range(self.header.n_layers) if self.header.is_linear(layer)]
        self._states = {layer: self._delta_rule.new_state(self.device) for layer in linear}


def _is_local(flags: int) -> bool:
    return bool(flags & LAYER_LOCAL_ROPE)


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap if cap else x


def _quantize_inputs(layer: int | None, slot: Slot, x: Float32s) -> Quantized:
    try:
        return quantize_activations(x)
    except WeightError as error:
        where = "the classifier's input" if layer is None else f"layer {layer}, {slot}"
        raise DataError(f"{where}: channel {error.column} of an activation is {error.reason}") from error


def _device(name: str) -> torch.device:
    """The torch device called ``name``. Raises UsageError when there is none on this machine."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).split("\n", 1)[0]
        raise UsageError(f"device {name!r} cannot be used: {first_line}") from error
    return device
