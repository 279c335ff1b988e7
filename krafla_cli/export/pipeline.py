"""``mlb export``: a .mlb model, with what lies beside it, in another format."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from krafla_cli.errors import UsageError
from krafla_cli.export.opened import open_for_export
from krafla_cli.progress import SILENT, Progress

FORMATS = ("gguf", "safetensors", "mllm")
DTYPES = ("f32", "bf16")


@dataclass(frozen=True)
class Result:
    """What an export wrote."""

    output: Path
    files: tuple[Path, ...]

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def export(
    model: str | os.PathLike[str],
    to: str,
    out: str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> Result:
    """Writes ``model`` as ``to``: "gguf" and "mllm" (one file), "safetensors" (a Hugging Face folder).

    Without ``out``: <name of model>.gguf, .mllm, or the folder <name of model>-hf, here. ``dtype``, for safetensors:
    "f32" (the default, exact) or "bf16". ``tokenizer``: instead of the one beside the model. Raises FileError,
    FormatError, ShapeError, UnsupportedError (what the format cannot hold), UsageError.
    """
    from krafla_cli.export.gguf import write_gguf
    from krafla_cli.export.mllm import write_mllm
    from krafla_cli.export.safetensors import write_folder

    if dtype is not None and to != "safetensors":
        raise UsageError(f"--dtype is for --to safetensors; {to} keeps the blocks as they are")
    opened = open_for_export(model, tokenizer)
    if to == "safetensors":
        folder = Path(out) if out is not None else Path(f"{opened.path.stem}-hf")
        return Result(folder, write_folder(opened, folder, dtype or "f32", force, progress))
    path = Path(out) if out is not None else Path(f"{opened.path.stem}.{to}")
    writers = {"gguf": write_gguf, "mllm": write_mllm}
    writers[to](opened, path, force, progress)
    return Result(path, (path,))
