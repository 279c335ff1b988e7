"""From the tensors of a .mlb back to those of a checkpoint: the inverse of what the conversion's plan does.

Rows go back to the checkpoint's order, matrices that hold several parts are filled from them, norms lose the 1 that was
added, and zero rows and columns of a padded FFN are cut off.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import FormatError
from krafla_cli.formats.mlb import Header, TensorSpec
from krafla_cli.formats.mlb_file import MlbFile
from krafla_cli.formats.text import counted, printable
from krafla_cli.parts import CheckpointLayout, Part
from krafla_cli.quant import ggml_blocks, q4_0
from krafla_cli.quant.blocks import Quantized
from krafla_cli.quant.matrix import dequantize
from krafla_cli.rope import interleaved_order

Float32s: TypeAlias = npt.NDArray[np.float32]
Rows: TypeAlias = npt.NDArray[np.intp]
_HEAD_COUNTS = {"wq": "q", "bq": "q", "wk": "k", "bk": "k", "q_norm": "one", "k_norm": "one"}


@dataclass(frozen=True)
class Piece:
    """One tensor of the .mlb that goes into a tensor of the checkpoint, to its ``rows`` (all, in order, where None)."""

    spec: TensorSpec
    rows: Rows | None


@dataclass(frozen=True)
class Target:
    """One tensor of a checkpoint and the pieces that it is made of. ``columns``: where those of the .mlb go."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    part: Part
    columns: Rows | None = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns; vectors count as one column."""
        return self.shape[0], math.prod(self.shape[1:])

    @property
    def n_bytes(self) -> int:
        """Bytes that are read for it, for the progress bar."""
        return sum(p.spec.total_bytes for p in self.pieces)


def checkpoint_targets(mlb: MlbFile, layout: CheckpointLayout, hidden_dim: int, prefix: str = "model.") -> list[Target]:
    """The tensors of a checkpoint of ``layout`` whose FFN is ``hidden_dim`` wide, in the model's order.

    ``prefix``: of all names but the classifier's, "model." in a Hugging Face checkpoint.
    Raises FormatError where the layout has no place for one of the model's tensors.
    """
    header = dataclasses.replace(mlb.header, hidden_dim=hidden_dim)
    targets: dict[str, Target] = {}
    for spec in mlb.tensors.values():
        if spec.role == "layer_flags":
            continue
        part = layout.parts.get(spec.role)
        if part is None:
            raise FormatError(f"{printable(mlb.path)}: {spec.name} has no place in this kind of checkpoint")
        name = part.name if spec.role == "wcls" else prefix + part.name.format(i=spec.layer)
        piece = Piece(spec, _source_rows(header, layout, part, spec.role))
        known = targets.get(name)
        columns = part.columns(header) if part.columns else None
        target = known or Target(name, _shape(header, part, spec), (), part, columns)
        targets[name] = dataclasses.replace(target, pieces=(*target.pieces, piece))
    return list(targets.values())


def _shape(header: Header, part: Part, spec: TensorSpec) -> tuple[int, ...]:
    shape = list(spec.shape)
    if spec.role in ("w1", "w3"):
        shape[0] = header.hidden_dim
    if spec.role == "w2":
        shape[1] = header.hidden_dim
    if part.source_rows is not None:
        shape[0] = part.source_rows(header)
    if part.middle_axis:
        shape.insert(1, 1)
    return tuple(shape)


def _source_rows(header: Header, layout: CheckpointLayout, part: Part, role: str) -> Rows | None:
    """Where the rows of the .mlb lie in the checkpoint: the part's own rows, in rotate-half order where it has it."""
    selected = part.rows(header) if part.rows else None
    if role not in _HEAD_COUNTS or layout.interleaved:
        return selected
    order = head_order(header, role)
    return order if selected is None else selected[order]


def head_order(header: Header, role: str) -> Rows:
    """Row i of the .mlb's ``role`` is row order[i] of the rotate-half layout. Only for roles of queries and keys."""
    n_heads = {"q": header.n_heads, "k": header.n_kv_heads, "one": 1}[_HEAD_COUNTS[role]]
    return interleaved_order(n_heads, header.head_size, header.rot_size)


def is_rotated(role: str) -> bool:
    """Whether the rows of ``role`` depend on the layout of RoPE."""
    return role in _HEAD_COUNTS


def dense(mlb: MlbFile, target: Target) -> Float32s:
    """The values of a target in its shape, float32."""
    rows, cols = target.matrix_shape
    out = np.empty((rows, cols), np.float32)
    for piece in target.pieces:
        values = _values(mlb, piece.spec)
        values = values.reshape(len(values), -1)
        places = np.arange(rows) if piece.rows is None else piece.rows
        out[places] = values[: len(places), :cols]
    if target.columns is not None:
        out[:, target.columns] = out.copy()
    if target.part.plus_one:
        out -= np.float32(1)
    if target.part.kept_as is not None:
        out = target.part.kept_as.save(out)
    return out.reshape(target.shape)


def _values(mlb: MlbFile, spec: TensorSpec) -> Float32s:
    if not spec.is_quantized:
        return mlb.float32(spec.name)
    matrix = mlb.quantized(spec.name)
    return dequantize(matrix.q, matrix.d, matrix.encoding, *matrix.shape)


def block_encoding(target: Target) -> str | None:
    """ "q4_0" or "q8_0" where the target can be written in just the blocks that the .mlb holds, else None."""
    encodings = {p.spec.encoding for p in target.pieces}
    columns = {p.spec.shape[-1] for p in target.pieces}
    if len(encodings) != 1 or not target.pieces[0].spec.is_quantized or columns != {target.shape[-1]}:
        return None
    if target.columns is not None and ggml_blocks.block_order(target.columns) is None:
        return None
    return encodings.pop()


def blocks(mlb: MlbFile, target: Target) -> Quantized:
    """The quants and scales of a target with a :func:`block_encoding`, rows in the checkpoint's order."""
    rows, cols = target.matrix_shape
    first = mlb.quantized(target.pieces[0].spec.name)
    q = np.empty((rows, first.q.shape[1]), first.q.dtype)
    d = np.empty((rows, cols // 32), first.d.dtype)
    for piece in target.pieces:
        matrix = mlb.quantized(piece.spec.name)
        places = np.arange(rows) if piece.rows is None else piece.rows
        q[places], d[places] = matrix.q[: len(places)], matrix.d[: len(places)]
    order = ggml_blocks.block_order(target.columns) if target.columns is not None else None
    return Quantized(q, d) if order is None else ggml_blocks.with_block_order(Quantized(q, d), np.argsort(order))


class ScaleRounding:
    """Rounds float32 scales to f16 where a format has no other, and adds up what that costs.

    The error of a weight is its level times the error of its scale.
    """

    def __init__(self, path: str) -> None:
        self._path = printable(path)
        self._error = self._total = 0.0
        self.n_rounded = 0

    def rounded(self, name: str, matrix: Quantized, encoding: str) -> Quantized:
        """``matrix`` with f16 scales. Raises FormatError naming it for a scale that f16 cannot hold."""
        if matrix.d.dtype == np.float16:
            return matrix
        with np.errstate(over="ignore"):
            d = matrix.d.astype(np.float16)
        if not np.isfinite(d).all():
            largest = float(np.abs(matrix.d).max())
            raise FormatError(f"{self._path}: {name}: a scale of {largest:g} is beyond what f16 holds")
        rows, n_blocks = matrix.d.shape
        levels = matrix.q if encoding == "q8_0" else q4_0.levels_of(matrix.q, rows, n_blocks * 32)
        squares = np.square(levels.reshape(rows, n_blocks, 32), dtype=np.float32).sum(axis=2, dtype=np.float64)
        self._error += float((squares * np.square(d.astype(np.float64) - matrix.d)).sum())
        self._total += float((squares * np.square(matrix.d, dtype=np.float64)).sum())
        self.n_rounded += 1
        return Quantized(matrix.q, d)

    @property
    def relative_error(self) -> float:
        """Of all weights so far: root of the summed squared errors over the summed squares."""
        return math.sqrt(self._error / self._total) if self._total else 0.0

    def remarks(self) -> Iterator[str]:
        """What to tell of it."""
        if self.n_rounded:
            matrices = counted(self.n_rounded, "matrix", "matrices")
            error = f"relative error of the weights {self.relative_error:.2g}"
            yield f"float32 scales of {matrices} were rounded to f16: {error}"
