"""X.json, the sidecar of X.mlb: chat template, stop ids, sampling defaults, provenance, SHA-256 of the .mlb.

What a model needs to be run as its makers meant it, and what the .mlb format has no place for.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from krafla_cli.errors import FileError, FormatError, os_reason
from krafla_cli.formats.json_file import read_json_object
from krafla_cli.formats.text import printable

VERSION = 1
_MAX_BYTES = 32 << 20
_HASH_CHUNK = 4 << 20


@dataclass(frozen=True)
class Sidecar:
    """The document. ``sampling`` holds temperature, top_k, top_p, min_p, repetition_penalty where the model has them.

    ``special_tokens``: bos_token, eos_token, ... as texts, which chat templates refer to. ``provenance``: source,
    config, tool version, options.
    """

    sha256: str
    chat_template: str | None = None
    stop_ids: tuple[int, ...] = ()
    sampling: dict[str, float] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The document as indented JSON."""
        return (json.dumps({"version": VERSION, **asdict(self)}, indent=2, ensure_ascii=True) + "\n").encode()


def sidecar_path(model: str | os.PathLike[str]) -> Path:
    """X.json beside X.mlb."""
    return Path(model).with_suffix(".json")


def files_beside(model: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The names of what may lie beside X.mlb: X.mlt or X.tokenizer.json, and X.json."""
    path = Path(model)
    if not path.name:
        return ()
    return (path.with_suffix(".mlt"), path.with_suffix(".tokenizer.json"), sidecar_path(path))


def read_sidecar(path: str | os.PathLike[str]) -> Sidecar:
    """Reads and checks a sidecar. Raises FileError, FormatError naming the key."""
    name = printable(str(path))
    doc = read_json_object(path, _MAX_BYTES)
    if doc.get("version") != VERSION:
        raise FormatError(f"{name}: version must be {VERSION}, is {printable(str(doc.get('version')))}")
    template, sha256 = doc.get("chat_template"), doc.get("sha256")
    if not isinstance(sha256, str):
        raise FormatError(f"{name}: sha256 is missing or no text")
    if template is not None and not isinstance(template, str):
        raise FormatError(f"{name}: chat_template must be text")
    return Sidecar(
        sha256,
        template,
        tuple(_typed_list(doc, "stop_ids", int, name)),
        {k: float(v) for k, v in _typed_dict(doc, "sampling", (int, float), name).items()},
        _typed_dict(doc, "special_tokens", (str,), name),
        _typed_dict(doc, "provenance", (object,), name),
    )


def _typed_list(doc: dict[str, Any], key: str, kind: type, name: str) -> list[Any]:
    value = doc.get(key) or []
    if not isinstance(value, list) or any(not isinstance(v, kind) or isinstance(v, bool) for v in value):
        raise FormatError(f"{name}: {key} must be a list of {kind.__name__}")
    return value


def _typed_dict(doc: dict[str, Any], key: str, kinds: tuple[type, ...], name: str) -> dict[str, Any]:
    value = doc.get(key) or {}
    if not isinstance(value, dict) or any(not isinstance(v, kinds) for v in value.values()):
        raise FormatError(f"{name}: {key} must be an object of {' or '.join(k.__name__ for k in kinds)}")
    return value


def file_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file in hexadecimal. Raises FileError."""
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as f:
            while chunk := f.read(_HASH_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise FileError(f"cannot read {printable(str(path))}: {os_reason(error)}") from error
    return digest.hexdigest()
