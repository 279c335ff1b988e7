"""The one place where torch checkpoints (.bin, .pt) are opened: tensors are read, pickled code never runs."""

from __future__ import annotations

import pickle
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from krafla_cli.errors import FormatError, UnsupportedError
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.text import printable

# What torch's reader raises for damaged files; it lets everything through that its parsing runs into.
_UNREADABLE = (
    RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError,
    OSError, struct.error,
)  # fmt: skip


def load_torch(path: Path) -> Mapping[Any, Any]:
    """The mapping that a torch checkpoint holds, its tensors mapped where the file allows it.

    Raises FileError (cannot be opened), UnsupportedError (a pickle that holds more than tensors, and could run code),
    FormatError (no readable checkpoint, or no mapping).
    """
    import torch

    name = printable(str(path))
    data = map_file(path)
    is_zip = bytes(data[:4]) == b"PK\x03\x04"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols: nothing that a user can act on
            # Files from before torch 1.6 are no zip archives and cannot be mapped by torch. They are read through the
            # map all the same: it never gives more bytes than there are, whatever lengths the file states.
            source: Any = path if is_zip else data.obj
            document = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip or None)
    except pickle.UnpicklingError as error:
        raise UnsupportedError(
            f"{name}: no pickle of tensors alone: it is damaged, or could run code, and is not opened; "
            "use the checkpoint's safetensors"
        ) from error
    except _UNREADABLE as error:
        raise FormatError(f"{name}: no readable torch checkpoint: {_reason(error, len(data))}") from error
    if not isinstance(document, Mapping):
        raise FormatError(f"{name}: must hold a state dict, holds a {type(document).__name__}")
    return document


def _reason(error: Exception, n_bytes: int) -> str:
    """What torch says where it says something; what its parsing ran into otherwise tells nobody anything."""
    if not n_bytes:
        return "the file is empty"
    lines = str(error).splitlines()
    if isinstance(error, (RuntimeError, OSError)) and lines:
        return printable(lines[0])
    return "its content is damaged, or of another kind"
