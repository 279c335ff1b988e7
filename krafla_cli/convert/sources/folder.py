"""Hugging Face folders: which files hold the weights, and paths that stay inside the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

from krafla_cli.convert.sources.base import Source
from krafla_cli.errors import FileError, FormatError, UnsupportedError
from krafla_cli.formats.json_file import read_json_object
from krafla_cli.formats.safetensors import SafetensorsFile
from krafla_cli.formats.text import printable

SAFETENSORS = "model.safetensors"
TORCH_BIN = "pytorch_model.bin"
_MAX_INDEX_BYTES = 64 << 20


def file_in(folder: Path, name: str) -> Path:
    """``folder / name``, which must be a plain file name and must not lead out of the folder.

    Links into the folder are followed, and those of a hub cache (snapshots/X/file -> blobs/...). Raises FormatError.
    """
    if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
        raise FormatError(f'{printable(str(folder))}: "{printable(name)}" is no plain file name')
    path, home = folder / name, folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(place) for place in allowed):
        raise FormatError(f"{printable(str(path))} is a link that leads out of the checkpoint folder")
    return path


def open_folder(folder: Path) -> Source:
    """The weights of a checkpoint folder: safetensors, else torch .bin; by the index if there is one.

    The index alone decides which files are read; others beside it are ignored. Raises FileError, FormatError, and
    UnsupportedError for a pickle that wants to run code.
    """
    for single, build in ((SAFETENSORS, SafetensorsSource), (TORCH_BIN, _torch_source)):
        index = file_in(folder, f"{single}.index.json")
        if index.exists():
            return build(folder, single, read_weight_map(index))
        if file_in(folder, single).exists():
            return build(folder, single, None)
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    hint = f"; it holds {printable(', '.join(found))}, which no index names" if found else ""
    raise FileError(f"{printable(str(folder))}: no {SAFETENSORS}, {TORCH_BIN} or index of either{hint}")


def _torch_source(folder: Path, single: str, weight_map: dict[str, str] | None) -> Source:
    from krafla_cli.convert.sources.torch_bin import TorchSource

    names = sorted(set(weight_map.values())) if weight_map else [single]
    return TorchSource(printable(str(folder)), {n: file_in(folder, n) for n in names}, weight_map)


def read_weight_map(index: Path) -> dict[str, str]:
    """The index's map from tensor name to file name. Raises FormatError."""
    weight_map = read_json_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{printable(str(index))}: weight_map is missing or empty")
    wrong = next((k for k, v in weight_map.items() if not isinstance(v, str)), None)
    if wrong is not None:
        raise FormatError(f"{printable(str(index))}: weight_map: {printable(wrong)} names no file")
    return weight_map


class SafetensorsSource(Source):
    """One safetensors file, or the shards that an index names."""

    def __init__(self, folder: Path, single: str, weight_map: dict[str, str] | None) -> None:
        self.title = printable(str(folder))
        names = sorted(set(weight_map.values())) if weight_map else [single]
        files = {name: SafetensorsFile(file_in(folder, name)) for name in names}
        if weight_map is None:
            self._files = dict.fromkeys(files[single].tensors, files[single])
        else:
            self._files = {tensor: files[file] for tensor, file in weight_map.items()}
            self._check_index()
        self._shapes = {name: file.tensors[name].shape for name, file in self._files.items()}

    def _check_index(self) -> None:
        for tensor, file in self._files.items():
            if tensor not in file.tensors:
                raise FormatError(f"{printable(file.path)}: the index names {printable(tensor)}, the file lacks it")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def dtype(self, name: str) -> str:
        return self._files[name].tensors[name].dtype

    def array(self, name: str) -> npt.NDArray[Any]:
        dtype = self.dtype(name)
        if dtype not in ("F32", "F16", "BF16"):
            raise UnsupportedError(
                f"{printable(self._files[name].path)}: {printable(name)} is {dtype}; weights must be F32, F16 or BF16"
            )
        return self._files[name].array(name)

    def release(self, name: str) -> None:
        self._files[name].release(name)
