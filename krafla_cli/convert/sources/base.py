"""The interface of a checkpoint: named tensors that are read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy.typing as npt

from krafla_cli.errors import FormatError
from krafla_cli.formats.text import printable


class Source(ABC):
    """A checkpoint's tensors. ``title`` names it in errors."""

    title: str

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name; nothing of the weights is read."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """The tensor's data type as safetensors names it ("BF16", "F32", "U8")."""

    @abstractmethod
    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor's values: float32, float16, or uint16 holding the bits of bfloat16; zero copy where possible."""

    def release(self, name: str) -> None:  # noqa: B027 - a source that holds no memory has nothing to give back
        """The tensor will not be needed soon: its memory may be given back."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor. Raises FormatError that names it when it is missing."""
        shape = self.shapes().get(name)
        if shape is None:
            raise FormatError(f"{self.title}: tensor {printable(name)} is missing")
        return shape
