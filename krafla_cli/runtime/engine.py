"""The engine contract: what generation, evaluation and the imatrix recorder know of a model that runs.

An engine is one sequence: weights, a KV cache of ``n_ctx`` positions, and a fixed state for linear-attention layers.
:class:`Engine` keeps the position and the ids and checks every call; an implementation computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import InputError
from krafla_cli.formats.mlb import Header

Float32s: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.int64]
LogitsWanted: TypeAlias = Literal["none", "last", "all"]

# The inputs of matrix products that an observer sees: of wq, wk, wv, wg (lqkv, lz, lb, la), of wo (lout), of w1 and w3,
# of w2, and of the classifier.
Slot: TypeAlias = Literal["attn_in", "attn_out", "ffn_in", "ffn_act", "classifier"]
# Called with (layer, slot, values): layer is None for the classifier; values [T, channels] float32 are the inputs
# before activation quantization. They may be a view that the engine overwrites later: copy what is to be kept.
Observer: TypeAlias = Callable[[int | None, Slot, Float32s], None]


@dataclass(frozen=True)
class EngineOptions:
    """How to run a model. None means the engine's own default.

    ``n_ctx``: positions of the KV cache. ``activations``: "q8" quantizes the input of every matrix product as the
    specification says, "f32" does not. ``kv``: type of the cached keys and values, "f16" or "f32". ``dtype``: type of
    dequantized weights and of the inputs they are multiplied with, "f32", "f16" or "bf16".
    """

    n_ctx: int
    activations: str | None = None
    kv: str | None = None
    threads: int | None = None
    device: str = "cpu"
    dtype: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """A place in a sequence to come back to: its ids [position] and a copy of the state that cannot be rewound.

    Keys and values are not copied: they stay in the cache until other ids are written over them.
    """

    ids: Ids
    state: Any


class Engine(ABC):
    """A model running one sequence.

    Implementations give ``_forward``, ``_copy_state``, ``_set_state`` and ``_clear_state``. Everything is
    deterministic; the split of a prompt into calls of ``forward`` changes results at most by rounding.
    """

    # Short names for reports: what computes ("fast", "reference"), and the options in effect.
    name: str
    activations: str
    kv: str

    def __init__(self, header: Header, n_ctx: int) -> None:
        if not 1 <= n_ctx <= header.max_seq:
            raise InputError(f"a context of {n_ctx} positions: the model allows 1 to {header.max_seq}")
        self.header = header
        self.n_ctx = n_ctx
        self.observer: Observer | None = None
        self.is_recurrent = any(header.is_linear(layer) for layer in range(header.n_layers))
        self._position = 0
        # The ids whose keys and values the cache holds: _n_held of them. Those from _position on can come back.
        self._history: Ids = np.zeros(n_ctx, np.int64)
        self._n_held = 0

    @property
    def position(self) -> int:
        """Number of ids in the sequence so far."""
        return self._position

    @property
    def ids(self) -> Ids:
        """The ids of the sequence so far, [position]."""
        return self._history[: self._position].copy()

    def forward(self, ids: Sequence[int] | Ids, logits: LogitsWanted = "last") -> Float32s:
        """Appends ``ids`` to the sequence.

        Returns float32 logits [n, vocab] with n = 0 ("none"), 1 ("last") or len(ids) ("all"). Raises InputError: no
        ids, an id outside the vocabulary, or more positions than the context has left; the sequence is then as before.
        """
        checked = self._check(np.asarray(ids, np.int64))
        start, end = self._position, self._position + len(checked)
        self._n_held = start  # from here on the cache is written over, whatever happens
        out = self._forward(checked, logits)
        self._history[start:end] = checked
        self._position = self._n_held = end
        return out

    def reset(self) -> None:
        """Empties the sequence."""
        self._position = 0
        self._clear_state()

    def truncate(self, n: int) -> None:
        """Keeps the first ``n`` ids. Raises InputError where a recurrent state cannot go back (n = 0 always can)."""
        if not 0 <= n <= self._position:
            raise InputError(f"cannot keep {n} positions of a sequence of {self._position}")
        if n == 0:
            self.reset()
        elif n < self._position and self.is_recurrent:
            raise InputError("a model with linear-attention layers cannot go back; use a snapshot, or start again")
        self._position = n

    def snapshot(self) -> Snapshot:
        """The present place in the sequence; cheap: no keys or values are copied."""
        return Snapshot(self.ids, self._copy_state() if self.is_recurrent else None)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to ``snapshot``, back or forth. Raises InputError when its positions have been written over."""
        n = len(snapshot.ids)
        if n > self._n_held or not np.array_equal(self._history[:n], snapshot.ids):
            raise InputError(f"the snapshot of {n} positions is no longer in the cache; run its ids again")
        if self.is_recurrent:
            self._set_state(snapshot.state)
        self._position = n

    def _check(self, ids: Ids) -> Ids:
        if ids.ndim != 1 or len(ids) == 0:
            raise InputError("no token ids to run")
        outside = ids[(ids < 0) | (ids >= self.header.vocab)]
        if len(outside):
            raise InputError(f"token id {outside[0]} is outside the vocabulary of {self.header.vocab}")
        n_left = self.n_ctx - self._position
        if len(ids) > n_left:
            raise InputError(f"{len(ids)} ids do not fit: {n_left} of {self.n_ctx} positions are left in the context")
        return ids

    @abstractmethod
    def _forward(self, ids: Ids, logits: LogitsWanted) -> Float32s:
        """Computes ``ids`` at positions self.position on; calls the observer for each input. Result as in forward."""

    @abstractmethod
    def _copy_state(self) -> Any:
        """A copy of the recurrent state of the linear-attention layers."""

    @abstractmethod
    def _set_state(self, state: Any) -> None:
        """Makes a copy of ``state``, from :meth:`_copy_state`, the present one."""

    @abstractmethod
    def _clear_state(self) -> None:
        """Makes the recurrent state that of position 0."""
