"""The weights of the reference engine as torch tensors, and the two ways to multiply them with inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from krafla_cli.formats.mlb import BLOCK, TensorSpec
from krafla_cli.formats.mlb_file import QuantizedArray
from krafla_cli.progress import Progress
from krafla_cli.quant.q4_0 import levels_of
from krafla_cli.runtime.engine import Float32s
from krafla_cli.runtime.weights import WeightSource


@dataclass(frozen=True)
class Codes:
    """Quantized inputs of a product, float32: ``q`` whole numbers [blocks, T, 32], their scales ``d`` [blocks, T]."""

    q: Tensor
    d: Tensor

    @staticmethod
    def of(q: npt.NDArray[np.int8], d: npt.NDArray[np.float32], device: torch.device) -> Codes:
        """From the activation quantizer's q [T, cols] and d [T, cols / 32]."""
        blocks = torch.tensor(q, device=device).float().view(len(q), -1, BLOCK).movedim(1, 0)
        return Codes(blocks.contiguous(), torch.tensor(d, device=device).T.contiguous())


Inputs: TypeAlias = "Tensor | Codes"


class Matrix(Protocol):
    """W [rows, cols]: ``product`` of inputs [T, cols] is y [T, rows]."""

    def product(self, x: Inputs) -> Tensor: ...


class FloatMatrix:
    """Dequantized weights, times inputs of their type; the products are float32 again."""

    def __init__(self, weights: Float32s, dtype: torch.dtype, device: torch.device) -> None:
        self.weights = torch.tensor(weights, dtype=dtype, device=device)

    def product(self, x: Inputs) -> Tensor:
        if isinstance(x, Codes):
            raise TypeError("codes need a BlockMatrix")
        return (x.to(self.weights.dtype) @ self.weights.T).float()


class BlockMatrix:
    """Quantized weights times quantized inputs, as the specification's runtime multiplies them.

    The sum of a block of 32 products is an exact integer (float32 holds it: 32 x 127 x 127 < 2^24); blocks are added in
    ascending order in float32, so that a position's result does not depend on the others of its batch.
    """

    def __init__(self, array: QuantizedArray, device: torch.device) -> None:
        rows, cols = array.shape
        levels = array.q if array.encoding == "q8_0" else levels_of(array.q.view(np.uint8), rows, cols)
        blocks = torch.tensor(levels, device=device).float().view(rows, -1, BLOCK)
        self.levels = blocks.permute(1, 2, 0).contiguous()  # [blocks, 32, rows]
        self.d = torch.tensor(array.d, device=device).float().T.contiguous()  # [blocks, rows]

    def product(self, x: Inputs) -> Tensor:
        if not isinstance(x, Codes):
            raise TypeError("a BlockMatrix needs codes")
        y = torch.zeros(x.q.shape[1], self.levels.shape[2], device=self.d.device)
        for block, levels in enumerate(self.levels):
            y += (x.q[block] @ levels) * (x.d[block][:, None] * self.d[block])
        return y


@dataclass(frozen=True)
class Weights:
    """The tensors of one layer, or those outside the layers, by role; absent roles are those that the model has not."""

    matrices: dict[str, Matrix]
    vectors: dict[str, Tensor]


def load_weights(
    source: WeightSource, dtype: torch.dtype | None, device: torch.device, progress: Progress
) -> tuple[Weights, list[Weights]]:
    """The weights outside the layers, and those of each layer. tok_emb is left out unless it classifies.

    Matrices are dequantized to ``dtype``, or stay quantized where it is None.
    """
    outside = Weights({}, {})
    layers = [Weights({}, {}) for _ in range(source.header.n_layers)]
    specs = [s for s in source.tensors.values() if _is_loaded(s, source)]
    progress.start("loading", sum(s.total_bytes for s in specs), "B")
    for spec in specs:
        into = outside if spec.layer is None else layers[spec.layer]
        if not spec.is_quantized:
            into.vectors[spec.role] = torch.tensor(source.float32(spec.name), device=device)
        elif dtype is None:
            into.matrices[spec.role] = BlockMatrix(source.quantized(spec.name), device)
        else:
            into.matrices[spec.role] = FloatMatrix(source.float32(spec.name), dtype, device)
        progress.advance(spec.total_bytes)
    progress.finish()
    return outside, layers


def _is_loaded(spec: TensorSpec, source: WeightSource) -> bool:
    return spec.encoding != "u8" and (spec.role != "tok_emb" or bool(source.header.shared_classifier))
