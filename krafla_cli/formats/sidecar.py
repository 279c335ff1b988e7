"""X.json, the sidecar of X.mlb: chat template, stop ids, sampling defaults, provenance, SHA-256 of the .mlb.

What a model needs to be run as its makers meant it, and what the .mlb format has no place for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from krafla_cli.errors import FileError, FormatError, os_reason
from krafla_cli.formats.json_file import read_json_object, shown_json
from krafla_cli.formats.text import printable

VERSION = 1
_MAX_BYTES = 32 << 20
_MOST = 1e300  # as a float
_HASH_CHUNK = 4 << 20
_MAX_QUICK_HASH = 64 << 20  # a tenth of a second


# What sampling values may be: the check, and its words.
SAMPLING_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda v: 0 <= v < math.inf, ">= 0"),
    "top_k": (lambda v: 0 <= v < math.inf and v == int(v), "a whole number >= 0"),
    "top_p": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "min_p": (lambda v: 0 <= v <= 1, "0 to 1"),
    "repetition_penalty": (lambda v: 0 < v < math.inf, "> 0"),
}


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
        document = {"version": VERSION, **asdict(self)}
        if "top_k" in self.sampling:
            document["sampling"]["top_k"] = int(self.sampling["top_k"])
        return (json.dumps(document, indent=2, ensure_ascii=True) + "\n").encode()


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
        raise FormatError(f"{name}: version must be {VERSION}, is {shown_json(doc.get('version'))}")
    template, sha256 = doc.get("chat_template"), doc.get("sha256")
    if not isinstance(sha256, str):
        raise FormatError(f"{name}: sha256 is missing or no text")
    if template is not None and not isinstance(template, str):
        raise FormatError(f"{name}: chat_template must be text, is {shown_json(template)}")
    return Sidecar(
        sha256,
        template,
        _stop_ids(doc.get("stop_ids"), name),
        _sampling(_dict_of(doc, "sampling", (int, float), "numbers", name), name),
        _dict_of(doc, "special_tokens", (str,), "texts", name),
        _dict_of(doc, "provenance", (object,), "values", name),
    )


def _stop_ids(value: Any, name: str) -> tuple[int, ...]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise FormatError(f"{name}: stop_ids must be a list of whole numbers, is {shown_json(value)}")
    return tuple(ids)


def _dict_of(doc: dict[str, Any], key: str, kinds: tuple[type, ...], what: str, name: str) -> dict[str, Any]:
    value = {} if doc.get(key) is None else doc[key]
    if not isinstance(value, dict):
        raise FormatError(f"{name}: {key} must be an object of {what}, is {shown_json(value)}")
    for inner, v in value.items():
        if not isinstance(v, kinds) or (isinstance(v, bool) and bool not in kinds and object not in kinds):
            raise FormatError(f"{name}: {key}: {printable(inner)} must be one of the {what}, is {shown_json(v)}")
    return value


def is_sampling_value(key: str, value: float) -> bool:
    """Whether a sampler can use ``value``; a whole number in JSON may have any size."""
    allowed = SAMPLING_RULES[key][0] if key in SAMPLING_RULES else math.isfinite
    return abs(value) < _MOST and allowed(value)


def _sampling(values: dict[str, int | float], name: str) -> dict[str, float]:
    for key, value in values.items():
        if not is_sampling_value(key, value):
            text = SAMPLING_RULES[key][1] if key in SAMPLING_RULES else "finite"
            raise FormatError(f"{name}: sampling: {printable(key)} must be {text}, is {shown_json(value)}")
    return {key: float(value) for key, value in values.items()}


def is_of_another(sidecar: Sidecar, model: str | os.PathLike[str]) -> bool:
    """Whether ``sidecar`` is of another model than the file ``model``; of a large one that is not looked at (False).

    ``mlb validate`` always looks. Raises FileError.
    """
    return Path(model).stat().st_size <= _MAX_QUICK_HASH and file_sha256(model) != sidecar.sha256


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
