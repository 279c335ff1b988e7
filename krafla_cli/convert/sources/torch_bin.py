"""torch .bin checkpoints: unpickled with ``weights_only``, so that a file can hold tensors and no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.sources.base import Source
from krafla_cli.errors import FormatError, UnsupportedError
from krafla_cli.formats.text import printable
from krafla_cli.torch_file import load_torch

if TYPE_CHECKING:
    import torch


class TorchSource(Source):
    """One pytorch_model.bin, or the shards that an index names. Tensors stay mapped until they are asked for."""

    def __init__(self, title: str, paths: dict[str, Path], weight_map: dict[str, str] | None) -> None:
        """``paths``: file name -> path; ``weight_map``: tensor -> file name (None: one file with all of them).

        Raises FileError, FormatError; UnsupportedError where a file is a pickle that wants to run code.
        """
        self.title = title
        files = {name: _load(path) for name, path in paths.items()}
        if weight_map is None:
            (self._tensors,) = files.values()
        else:
            self._tensors = {t: _from(files[f], paths[f], t) for t, f in weight_map.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in self._tensors.items()}

    def dtype(self, name: str) -> str:
        kind = str(self._tensors[name].dtype).removeprefix("torch.")
        return {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(kind, kind)

    def array(self, name: str) -> npt.NDArray[Any]:
        import torch

        tensor = self._tensors[name].detach()
        if self.dtype(name) not in ("F32", "F16", "BF16"):
            raise UnsupportedError(
                f"{self.title}: {printable(name)} is {self.dtype(name)}; weights must be F32, F16 or BF16"
            )
        tensor = tensor.contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.uint16).numpy()
        return np.asarray(tensor.numpy())


def _from(tensors: dict[str, torch.Tensor], path: Path, name: str) -> torch.Tensor:
    if name not in tensors:
        raise FormatError(f"{printable(str(path))}: the index names {printable(name)}, the file lacks it")
    return tensors[name]


def _load(path: Path) -> dict[str, torch.Tensor]:
    import torch

    document = load_torch(path)
    if isinstance(document.get("state_dict"), Mapping):
        document = document["state_dict"]
    if not all(isinstance(t, torch.Tensor) for t in document.values()):
        raise FormatError(f"{printable(str(path))}: holds no state dict (names and tensors)")
    return {str(k): t for k, t in document.items()}
