"""``mlb``: converters and runners for compact model files (.mlb, .mlt, MLI1, LEMB).

The public names below are imported when they are first used, so that ``import krafla_cli`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from krafla_cli.convert.pipeline import convert
    from krafla_cli.embed.embedder import open_embedder
    from krafla_cli.report.validate import validate
    from krafla_cli.runtime.model import open_model
    from krafla_cli.tokenizer.load import load_tokenizer

# name -> module that has it
_MODULES = {
    "load_tokenizer": "krafla_cli.tokenizer.load",
    "open_embedder": "krafla_cli.embed.embedder",
    "open_model": "krafla_cli.runtime.model",
    "validate": "krafla_cli.report.validate",
}


def __getattr__(name: str) -> Any:
    if name == "convert":
        return importlib.import_module("krafla_cli.convert")  # a package that can be called
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


__all__ = ["convert", "load_tokenizer", "open_embedder", "open_model", "validate"]
