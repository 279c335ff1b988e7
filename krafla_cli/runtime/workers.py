"""Opening a model once more in another process, where a pool's worker runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from krafla_cli.errors import DataError
from krafla_cli.formats.text import printable
from krafla_cli.runtime.imatrix import WindowRecorder
from krafla_cli.runtime.model import Model, open_model


def open_same_model(path: Path, n_bytes: int, options: Mapping[str, Any]) -> Model:
    """Opens ``path`` with the ``options`` of open_model, if it has ``n_bytes`` here too.

    Raises DataError (another file lies there), and as open_model.
    """
    model = open_model(path, **options)
    found = path.stat().st_size
    if found != n_bytes:
        raise DataError(f"{printable(str(path))}: {found} bytes on a worker, {n_bytes} where the command began")
    return model


def open_recorder(path: Path, n_bytes: int, with_logits: bool, options: Mapping[str, Any]) -> WindowRecorder:
    """A worker of record_windows. Raises as :func:`open_same_model`."""
    return WindowRecorder(open_same_model(path, n_bytes, options).engine, with_logits)
