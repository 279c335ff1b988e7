"""Which importance a matrix is quantized with: the slot of an importance matrix that holds its input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import ShapeError
from krafla_cli.formats.mlb import Header, TensorSpec
from krafla_cli.formats.mli import Dimensions, Imatrix, slot_name
from krafla_cli.progress import Progress
from krafla_cli.quant.q4_0 import channel_importance

Float32s = npt.NDArray[np.float32]

_SLOTS = {
    **dict.fromkeys(("wq", "wk", "wv", "wg", "lqkv", "lz"), "attn_in"),
    **dict.fromkeys(("wo", "lout"), "attn_out"),
    **dict.fromkeys(("w1", "w3"), "ffn_in"),
    "w2": "ffn_act",
}


@dataclass
class Importance:
    """The importance matrix of a conversion; ``progress`` is told where a matrix cannot use it."""

    imatrix: Imatrix
    header: Header
    title: str
    progress: Progress

    def __post_init__(self) -> None:
        """Raises ShapeError where the imatrix was made for a model of other dimensions."""
        wanted = Dimensions.of(self.header)
        if self.imatrix.dimensions != wanted:
            raise ShapeError(f"{self.title}: made for {self.imatrix.dimensions}; the model has {wanted}")
        self._warned: set[str] = set()

    def of(self, spec: TensorSpec) -> Float32s | None:
        """Importance of the input channels of ``spec``, float32 [cols]; None: the plain fit.

        A slot that was never run, or whose mean is zero or not finite, gives 1 for all channels, with a warning.
        """
        if spec.encoding != "q4_0":
            return None
        slot = self._slot(spec)
        if slot is None:
            return None
        layer = None if slot == "classifier" else spec.layer
        name = slot_name(layer, slot)
        if self.imatrix.tokens_of(layer) == 0:
            self._warn(name, "no tokens were summed into it")
            return np.ones(spec.shape[1], np.float32)
        importance = channel_importance(self.imatrix.of(layer, slot))
        if importance is None:
            self._warn(name, "the mean of its sums is zero or not finite")
            return np.ones(spec.shape[1], np.float32)
        return importance

    def _slot(self, spec: TensorSpec) -> str | None:
        """The slot of a matrix; an untied embedding has none, since its input is an id."""
        if spec.role == "wcls" or (spec.role == "tok_emb" and self.header.shared_classifier):
            return "classifier"
        if spec.role == "lout" and self.header.lin_v_size != self.header.q_dim:
            sizes = f"its input has {self.header.lin_v_size} channels, q_dim is {self.header.q_dim}"
            self._warn("lout", f"{sizes}: MLI1 has no place for it")
            return None
        return _SLOTS.get(spec.role)

    def _warn(self, slot: str, reason: str) -> None:
        if slot not in self._warned:
            self._warned.add(slot)
            self.progress.warn(f"{self.title}: {slot}: {reason}; quantized without importance")
