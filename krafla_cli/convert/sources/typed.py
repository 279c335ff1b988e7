"""GGUF and MLLM files as sources: tensors of any data type, Q4_0 and Q8_0 blocks as they are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.sources.base import Source
from krafla_cli.errors import DataError, UnsupportedError
from krafla_cli.formats.cursor import release_pages
from krafla_cli.formats.data_types import BY_NAME
from krafla_cli.formats.gguf import GgufFile
from krafla_cli.formats.mllm import MllmFile
from krafla_cli.formats.text import printable
from krafla_cli.quant import ggml_blocks
from krafla_cli.quant.blocks import Quantized
from krafla_cli.quant.types import check_decodable, deinterleave, dequantize

_VIEWS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class TypedSource(Source):
    """The tensors of an open GGUF or MLLM file under the names that the file gives them."""

    def __init__(self, file: GgufFile | MllmFile) -> None:
        self.title = file.title
        self._file = file
        # Tensors without a shape (MLLM version 1) come as vectors.
        self._shapes = {n: t.shape if t.shape is not None else (t.n_weights or 0,) for n, t in file.tensors.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def settled_shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...]:
        shape = self.shape(name)
        if self._file.tensors[name].shape is not None:
            return shape
        n_weights = math.prod(shape)
        if wanted[0] == -1 and n_weights % math.prod(wanted[1:]) == 0:
            wanted = (n_weights // math.prod(wanted[1:]), *wanted[1:])
        if math.prod(wanted) == n_weights:
            self._shapes[name] = wanted
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return self._file.tensors[name].kind.name

    def check_weights(self, name: str) -> None:
        try:
            check_decodable(self._file.tensors[name].kind)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.title}: {printable(name)}: {error}") from error

    def array(self, name: str) -> npt.NDArray[Any]:
        info, data, shape = self._file.tensors[name], self._file.raw(name), self._shapes[name]
        if info.kind.name in _VIEWS:
            return data.view(_VIEWS[info.kind.name]).reshape(shape)
        try:
            return dequantize(data, info.kind, shape)
        except (DataError, UnsupportedError) as error:
            raise type(error)(f"{self.title}: {printable(name)}: {error}") from error

    def release(self, name: str) -> None:
        info = self._file.tensors[name]
        release_pages(self._file.data, info.offset, info.n_bytes)

    def block_encoding(self, name: str) -> str | None:
        kind = self._file.tensors[name].kind
        return kind.name[:4].lower() if kind.name[:4] in ("Q4_0", "Q8_0") else None

    def blocks(self, name: str) -> Quantized:
        rows, cols = self._shapes[name]
        kind, encoding = self._file.tensors[name].kind, self.block_encoding(name)
        if encoding is None:
            raise ValueError(f"{name} is not stored in blocks")
        data: npt.NDArray[np.uint8] = self._file.raw(name)
        if kind is not BY_NAME[encoding.upper()]:
            data = deinterleave(data, kind, rows, cols)
        return ggml_blocks.split(data, encoding, rows, cols)
