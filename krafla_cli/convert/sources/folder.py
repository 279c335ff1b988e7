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

SAFETENSORS_INDEX = "model.safetensors.index.json"
SAFETENSORS = "model.safetensors"
_MAX_INDEX_BYTES = 64 << 20


def file_in(folder: Path, name: str) -> Path:
    """``folder / name``, which must be a plain file name and must not lead out of the folder.

    Links into the folder are followed, and those of a hub cache (snapshots/X/file -> blobs/...). Raises FormatError.
    """
    if Path(name).name != name or name in ("", ".", ".."):
        raise FormatError(f'{printable(str(folder))}: "{printable(name)}" is no plain file name')
    path, home = folder / name, folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(place) for place in allowed):
        raise FormatError(f"{printable(str(path))} is a link that leads out of the checkpoint folder")
    return path


def open_folder(folder: Path) -> Source:
    """The weights of a checkpoint folder: by the index if there is one, else the single file.

    The index alone decides which files are read; others beside it are ignored. Raises FileError or FormatError.
    """
    index = file_in(folder, SAFETENSORS_INDEX)
    if index.exists():
        return SafetensorsSource(folder, read_weight_map(index))
    if (folder / SAFETENSORS).exists():
        return SafetensorsSource(folder, None)
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    hint = f"; it holds {printable(', '.join(found))}, which no index names" if found else ""
    raise FileError(f"{printable(str(folder))}: no {SAFETENSORS} and no {SAFETENSORS_INDEX}{hint}")


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

    def __init__(self, folder: Path, weight_map: dict[str, str] | None) -> None:
        self.title = printable(str(folder))
        names = sorted(set(weight_map.values())) if weight_map else [SAFETENSORS]
        files = {name: SafetensorsFile(file_in(folder, name)) for name in names}
        if weight_map is None:
            self._files = dict.fromkeys(files[SAFETENSORS].tensors, files[SAFETENSORS])
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
