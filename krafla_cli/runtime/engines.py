"""The engines by name, imported when they are opened: one pays for torch or numba only where it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from krafla_cli.errors import UsageError
from krafla_cli.formats.mlb_file import MlbFile
from krafla_cli.progress import SILENT, Progress
from krafla_cli.runtime.engine import Engine, EngineOptions

# Each module has open_engine(model, options, progress) -> Engine.
ENGINES = {"fast": "krafla_cli.runtime.fast", "reference": "krafla_cli.runtime.reference"}
_Opener = Callable[[MlbFile, EngineOptions, Progress], Engine]


def default_engine(options: EngineOptions) -> str:
    """fast on a CPU with quantized activations, else reference, which runs on any device that torch has."""
    is_fast = options.device == "cpu" and options.activations != "f32"
    return "fast" if is_fast else "reference"


def open_engine(model: MlbFile, options: EngineOptions, name: str | None = None, progress: Progress = SILENT) -> Engine:
    """The engine ``name`` ("fast", "reference"; None: the default of the device) running ``model``.

    Raises UsageError (an engine or option that does not exist), InputError (more context than the model allows).
    """
    chosen = name or default_engine(options)
    if chosen not in ENGINES:
        raise UsageError(f"no engine {chosen!r}; there are {', '.join(ENGINES)}")
    if chosen == "fast" and options.device != "cpu":
        raise UsageError(f"the fast engine runs on the CPU only, not on {options.device}; use --engine reference")
    module = importlib.import_module(ENGINES[chosen])
    return cast(_Opener, module.open_engine)(model, options, progress)
