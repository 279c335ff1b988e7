"""Where the reference engine's weights come from: a .mlb, or float32 weights that were never quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from krafla_cli.errors import UsageError
from krafla_cli.formats.mlb import Header, TensorSpec, tensors
from krafla_cli.formats.mlb_file import MlbFile, QuantizedArray
from krafla_cli.quant.matrix import dequantize
from krafla_cli.runtime.engine import Float32s, Ids


class WeightSource(Protocol):
    """The tensors of a model in the format's layout, by the names of ``tensors(header)``."""

    @property
    def header(self) -> Header: ...

    @property
    def tensors(self) -> Mapping[str, TensorSpec]: ...

    def float32(self, name: str) -> Float32s:
        """Any tensor in its shape, matrices dequantized."""

    def rows(self, name: str, ids: Ids) -> Float32s:
        """Rows of a matrix, [len(ids), cols]."""

    def quantized(self, name: str) -> QuantizedArray:
        """A matrix as the file holds it. Raises UsageError where there is no file."""


class FileWeights:
    """The weights of a .mlb."""

    def __init__(self, file: MlbFile) -> None:
        self.header = file.header
        self.tensors = file.tensors
        self.quantized = file.quantized
        self._file = file

    def float32(self, name: str) -> Float32s:
        if not self.tensors[name].is_quantized:
            return self._file.float32(name)
        array = self._file.quantized(name)
        return dequantize(array.q, array.d, array.encoding, *array.shape)

    def rows(self, name: str, ids: Ids) -> Float32s:
        array = self._file.quantized(name)
        return dequantize(array.q[ids], array.d[ids], array.encoding, len(ids), array.shape[1])


class DenseWeights:
    """Weights that ``load`` gives in float32, in the shape and layout of their TensorSpec."""

    def __init__(self, header: Header, load: Callable[[TensorSpec], Float32s]) -> None:
        self.header = header
        self.tensors = {spec.name: spec for spec in tensors(header)}
        self._load = load
        self._kept: dict[str, Float32s] = {}

    def float32(self, name: str) -> Float32s:
        return self._load(self.tensors[name])

    def rows(self, name: str, ids: Ids) -> Float32s:
        if name not in self._kept:
            self._kept[name] = self.float32(name)
        return self._kept[name][ids]

    def quantized(self, name: str) -> QuantizedArray:
        raise UsageError(f"{name} is not quantized: a checkpoint runs with --activations f32 only")
