"""The fast engine: the CPU's kernels on the weights as they lie in the mapped file, activations quantized.

The forward pass is a program of kernel operations, built once when the model is opened and run by a team of threads, so
that a step costs Python a few microseconds. Results have the same bits for any number of threads and any split of a
prompt into calls of ``forward``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from krafla_cli.errors import DataError, UsageError
from krafla_cli.formats.mlb import LAYER_LOCAL_ROPE, LAYER_NO_ROPE
from krafla_cli.formats.mlb_file import MlbFile
from krafla_cli.kernels import operations as ops
from krafla_cli.kernels.native import prepare
from krafla_cli.kernels.structs import address
from krafla_cli.kernels.team import RUN, STEP, Call, Program, Team
from krafla_cli.progress import SILENT, Progress
from krafla_cli.rope import rotation_tables
from krafla_cli.runtime.engine import Engine, EngineOptions, Float32s, Ids, LogitsWanted
from krafla_cli.runtime.fast_memory import Buffers, KvCache, RecurrentState
from krafla_cli.runtime.fast_program import Builder, Inputs, Memory, named_place

BATCH = 256  # positions computed together at most: their activations fit the last-level cache


def open_engine(model: MlbFile, options: EngineOptions, progress: Progress) -> Engine:
    """The fast engine running ``model``; an f16 cache and the physical cores unless ``options`` say otherwise."""
    return FastEngine(model, options, progress)


class FastEngine(Engine):
    """See :class:`~krafla_cli.runtime.engine.Engine`."""

    name = "fast"
    activations = "q8"

    def __init__(self, model: MlbFile, options: EngineOptions, progress: Progress = SILENT) -> None:
        if options.activations not in (None, "q8"):
            raise UsageError("the fast engine quantizes activations (q8); use --engine reference for f32")
        if options.dtype is not None:
            raise UsageError("--dtype is for --engine reference; the fast engine multiplies the quantized weights")
        super().__init__(model.header, options.n_ctx)
        h = model.header
        self.kv = options.kv or "f16"
        self._model = model
        self._buffers = Buffers(h, min(BATCH, options.n_ctx), options.n_ctx)
        self._memory = self._new_memory()
        self._fault = np.zeros(3, np.int64)
        self._one = _Forward(model, self._buffers, self._memory, one_position=True)
        self._many = _Forward(model, self._buffers, self._memory, one_position=False)
        calls = (*self._one.calls, *self._many.calls)
        prepare(list(dict.fromkeys((RUN, *(c.native for c in calls)))), progress)
        self._one.link()
        self._many.link()
        n_cols = max(h.dim, h.q_dim, h.hidden_dim, h.lin_v_size)
        self._team = Team(options.threads, ops.scratch_bytes(n_cols, self._buffers.n_positions, h.head_size))

    def _new_memory(self) -> Memory:
        h = self.header
        attention = [i for i in range(h.n_layers) if not h.is_linear(i)]
        linear = [i for i in range(h.n_layers) if h.is_linear(i)]
        kinds = {bool(h.flags_of(i) & LAYER_LOCAL_ROPE) for i in attention if not h.flags_of(i) & LAYER_NO_ROPE}
        return Memory(
            caches={i: KvCache(h, self.n_ctx, self.kv) for i in attention},
            states={i: RecurrentState(h) for i in linear},
            rotations={local: rotation_tables(h, self.n_ctx, local) for local in kinds},
            taps={i: np.ascontiguousarray(self._model.float32(f"layers.{i}.lconv").T) for i in linear},
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Steps

    def _forward(self, ids: Ids, logits: LogitsWanted) -> Float32s:
        n_wanted = {"none": 0, "last": 1, "all": len(ids)}[logits]
        out = np.empty((n_wanted, self.header.vocab), np.float32)
        first_wanted = len(ids) - n_wanted
        for start in range(0, len(ids), self._buffers.n_positions):
            part = ids[start : start + self._buffers.n_positions]
            end = start + len(part)
            self._step(part, self.position + start, out[max(0, start - first_wanted) : max(0, end - first_wanted)])
        return out

    def _step(self, ids: Ids, position: int, out: Float32s) -> None:
        """Runs ``ids`` at ``position``, and fills ``out`` [n, vocab] with the logits of the last n of them."""
        layers = self._one if len(ids) == 1 else self._many
        if len(out) == len(ids) == 1:
            layers.aim_classifier(self._buffers.x, out)
            self._run(layers, 0, len(layers.calls), ids, position, 1)
            return
        self._run(layers, 0, layers.n_body, ids, position, len(ids))
        if len(out):
            classifier = self._one if len(out) == 1 else self._many
            classifier.aim_classifier(self._buffers.x[len(ids) - len(out) :], out)
            self._run(classifier, classifier.n_body, len(classifier.calls), ids, position, len(out))

    def _run(self, forward: _Forward, first: int, last: int, ids: Ids, position: int, n: int) -> None:
        """Runs operations on ``n`` positions, with a stop for each observed input. Raises DataError: _check_fault."""
        self._fault[0] = 0
        step = STEP.pack(n_tokens=n, position=position, ids=ids, fault=self._fault)
        if self.observer is None:
            self._team.run(forward.program, step, first, last)
        else:
            observed = {i.end: i for i in forward.inputs if first < i.end <= last}
            for start, end in pairwise(sorted({first, *observed, last})):
                self._team.run(forward.program, step, start, end)
                if end in observed:
                    self.observer(observed[end].layer, observed[end].slot, observed[end].values[:n])
        self._check_fault(forward.inputs)

    def _check_fault(self, inputs: list[Inputs]) -> None:
        """Raises DataError where the last run met an activation that is NaN or infinite."""
        if self._fault[0]:
            place = named_place(int(self._fault[0]) - 1)
            n_channels = next(i.values.shape[1] for i in inputs if (i.layer, i.slot) == place)
            where = "the classifier's input" if place[0] is None else f"layer {place[0]}, {place[1]}"
            channel = int(self._fault[1]) % n_channels
            raise DataError(f"{where}: channel {channel} of an activation is {'NaN' if self._fault[2] else 'infinite'}")

    # -----------------------------------------------------------------------------------------------------------------
    # The recurrent state

    def _copy_state(self) -> Any:
        return {layer: state.copy() for layer, state in self._memory.states.items()}

    def _set_state(self, state: Any) -> None:
        for layer, saved in state.items():
            self._memory.states[layer].set(saved)

    def _clear_state(self) -> None:
        for state in self._memory.states.values():
            state.clear()


class _Forward:
    """The forward pass for one position or for many: ``n_body`` operations of the layers, then the classifier."""

    def __init__(self, model: MlbFile, buffers: Buffers, memory: Memory, one_position: bool) -> None:
        builder = Builder(model, buffers, one_position)
        builder.body(memory)
        self.n_body = len(builder.calls)
        builder.classifier()
        self.calls: list[Call] = builder.calls
        self.inputs = builder.inputs

    def link(self) -> None:
        """Makes the program, once all its operations are compiled."""
        self.program = Program(self.calls)

    def aim_classifier(self, x: Float32s, out: Float32s) -> None:
        """Lets the classifier read the residual from ``x`` and write logits to ``out``."""
        norm, matrix, *caps = (call.operands for call in self.calls[self.n_body :])
        norm[ops.NORM.index("x")] = address(x)
        matrix[ops.MATRIX.index("y")] = address(out)
        for cap in caps:
            cap[ops.CAP.index("x")] = address(out)
