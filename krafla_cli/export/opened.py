"""A .mlb model opened for export, with what lies beside it: its tokenizer and its settings."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from krafla_cli.errors import FileError, FormatError, os_reason
from krafla_cli.formats import mlt
from krafla_cli.formats.mlb_file import MlbFile, open_mlb
from krafla_cli.formats.sidecar import Sidecar, file_sha256, read_sidecar, sidecar_path
from krafla_cli.formats.text import printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENIZER_SUFFIXES = (".mlt", ".tokenizer.json")
# Special tokens by their name in a chat template and in tokenizer_config.json.
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True)
class OpenedModel:
    """``tokenizer_path`` and ``settings`` are None where the file does not exist."""

    path: Path
    mlb: MlbFile
    tokenizer_path: Path | None
    settings: Sidecar | None

    @property
    def name(self) -> str:
        """What the model is called: its source's name, else its file's."""
        source = self.settings.provenance.get("source") if self.settings else None
        return source if isinstance(source, str) else self.path.stem

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Raises FileError, FormatError, UnsupportedError."""
        from krafla_cli.tokenizer import load_tokenizer

        return load_tokenizer(self.tokenizer_path) if self.tokenizer_path is not None else None

    @property
    def tokenizer_text(self) -> str | None:
        """The tokenizer.json beside the model; None where a .mlt is there, or nothing."""
        if self.tokenizer_path is None or self.tokenizer_path.suffix == ".mlt":
            return None
        return _read(self.tokenizer_path).decode("utf-8-sig")

    @property
    def tokenizer_json(self) -> bytes | None:
        """tokenizer.json: the one beside the model, or what the .mlt stands for."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer_text or json.dumps(json.loads(self.tokenizer.to_str()), indent=2, ensure_ascii=False)
        return text.encode()

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """ "bos", "eos", "unknown", "padding" -> id, from the settings and the .mlt."""
        ids: dict[str, int] = {}
        if self.tokenizer is not None and self.settings is not None:
            for key, name in _SPECIAL.items():
                found = self.tokenizer.token_to_id(self.settings.special_tokens.get(key, ""))
                ids |= {name: found} if found is not None else {}
        if self.tokenizer_path is not None and self.tokenizer_path.suffix == ".mlt":
            stored = mlt.read(self.tokenizer_path)
            ids |= {name: i for name, i in (("bos", stored.bos), ("eos", stored.eos)) if i >= 0}
        return ids

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The settings' stop ids; without settings, the tokenizer's EOS."""
        if self.settings is not None:
            return self.settings.stop_ids
        return (self.special_ids["eos"],) if "eos" in self.special_ids else ()

    @property
    def provenance(self) -> dict[str, Any]:
        return self.settings.provenance if self.settings is not None else {}


def open_for_export(path: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None) -> OpenedModel:
    """Opens ``path``; ``tokenizer`` (.mlt or tokenizer.json) replaces the one beside it.

    Raises FileError, FormatError (also where the settings are another model's), ShapeError.
    """
    model = Path(path)
    mlb = open_mlb(model)
    settings = None
    if sidecar_path(model).exists():
        settings = read_sidecar(sidecar_path(model))
        if settings.sha256 != file_sha256(model):
            name = printable(str(sidecar_path(model)))
            raise FormatError(f"{name} is not this model's: its SHA-256 is another one; move it away to go on without")
    if tokenizer is not None and not Path(tokenizer).exists():
        raise FileError(f"cannot open {printable(str(tokenizer))}: No such file or directory")
    candidates = [Path(tokenizer)] if tokenizer is not None else [model.with_suffix(s) for s in _TOKENIZER_SUFFIXES]
    return OpenedModel(model, mlb, next((p for p in candidates if p.exists()), None), settings)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {printable(str(path))}: {os_reason(error)}") from error
