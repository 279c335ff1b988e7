"""The interface of a checkpoint: named tensors that are read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy.typing as npt

from krafla_cli.errors import FormatError, UnsupportedError
from krafla_cli.formats.text import printable
from krafla_cli.quant.blocks import Quantized


class Source(ABC):
    """A checkpoint's tensors. ``title`` names it in errors."""

    title: str

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name; nothing of the weights is read."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """The tensor's data type as safetensors names it ("BF16", "F32", "U8"), or as the format of the file does."""

    @abstractmethod
    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor's values: float32, float16, or uint16 holding the bits of bfloat16; zero copy where possible."""

    def release(self, name: str) -> None:  # noqa: B027 - a source that holds no memory has nothing to give back
        """The tensor will not be needed soon: its memory may be given back."""

    def check_weights(self, name: str) -> None:
        """Raises UnsupportedError where the tensor's type holds no weights that can be converted."""
        dtype = self.dtype(name)
        if dtype not in ("F32", "F16", "BF16"):
            why = (
                "weights must be"
                if dtype in ("F64", "float64")
                else ("the checkpoint is quantized already; convert the original one in")
            )
            raise UnsupportedError(f"{self.title}: {printable(name)} is {dtype}: {why} F32, F16 or BF16")

    def block_encoding(self, name: str) -> str | None:
        """ "q4_0" or "q8_0" where the tensor is stored in just these blocks, so that they can be copied."""
        return None

    def blocks(self, name: str) -> Quantized:
        """The quants and f16 scales of a tensor that has a :meth:`block_encoding`."""
        raise ValueError(f"{name} is not stored in blocks")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor. Raises FormatError that names it when it is missing."""
        shape = self.shapes().get(name)
        if shape is None:
            raise FormatError(f"{self.title}: tensor {printable(name)} is missing")
        return shape

    def settled_shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape; in a file without shapes it becomes ``wanted`` where that has as many weights.

        A first dimension of -1 stands for any number of rows. Raises FormatError as :meth:`shape`.
        """
        return self.shape(name)
