"""Finding what lies beside X.mlb: its tokenizer (X.mlt or X.tokenizer.json) and its settings (X.json)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from krafla_cli.errors import FileError, FormatError
from krafla_cli.formats.sidecar import Sidecar, read_sidecar, sidecar_path
from krafla_cli.formats.text import printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_SUFFIXES = (".mlt", ".tokenizer.json")


@dataclass(frozen=True)
class Companions:
    """What lies beside the .mlb at ``model``; None for what was not found.

    ``template``: a chat template that replaces the one of the settings.
    """

    model: Path
    tokenizer: Path | None
    settings: Sidecar | None
    template: str | None = None

    @property
    def chat_template(self) -> str | None:
        """The chat template in effect."""
        return self.template if self.template is not None else self.settings.chat_template if self.settings else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ... as texts, which chat templates refer to."""
        return self.settings.special_tokens if self.settings else {}

    @property
    def no_tokenizer(self) -> str:
        """What to tell where a tokenizer is needed and missing: the paths tried."""
        return f"no tokenizer: tried {_names(_tokenizer_paths(self.model))}; give one with --tokenizer"

    @property
    def no_settings(self) -> str:
        """What to tell where settings would matter and are missing: the path tried."""
        return f"no settings: tried {_names([sidecar_path(self.model)])}; going on without chat template and defaults"


def find_companions(
    model: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None, template: str | None = None
) -> Companions:
    """The companions of ``model``; ``tokenizer`` (a .mlt or a tokenizer.json) replaces the search for one.

    ``template`` names a built-in chat template, or a file with one. Raises FileError (``tokenizer`` does not exist,
    ``template`` cannot be read), UsageError (no such template), FormatError (broken settings).
    """
    if tokenizer is not None and not Path(tokenizer).exists():
        raise FileError(f"cannot open {printable(str(tokenizer))}: No such file or directory")
    candidates = [Path(tokenizer)] if tokenizer is not None else _tokenizer_paths(Path(model))
    settings = sidecar_path(model)
    return Companions(
        Path(model),
        next((path for path in candidates if path.exists()), None),
        read_sidecar(settings) if settings.exists() else None,
        None if template is None else _read_template(template),
    )


def _read_template(name: str) -> str:
    from krafla_cli.tokenizer.templates import read_template

    return read_template(name)


def _tokenizer_paths(model: Path) -> list[Path]:
    return [model.with_suffix(suffix) for suffix in TOKENIZER_SUFFIXES]


def _names(paths: list[Path]) -> str:
    return ", ".join(printable(str(path)) for path in paths)


def open_tokenizer(path: Path, vocab: int) -> Tokenizer:
    """The tokenizer in ``path``. Raises FormatError where its vocabulary is larger than the model's.

    Added tokens may lie above the model's ids (an image token of a text model): text rarely holds them, and the engine
    refuses their ids.
    """
    from krafla_cli.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    n_ids: int = tokenizer.get_vocab_size(with_added_tokens=False)
    if n_ids > vocab:
        raise FormatError(
            f"{printable(str(path))} has {n_ids} tokens, the model {vocab}: it is another model's tokenizer"
        )
    return tokenizer


def end_of_text(path: Path | None) -> frozenset[int]:
    """The EOS id that a .mlt names: what ends a generation where there are no settings."""
    from krafla_cli.formats import mlt

    if path is None or path.suffix != ".mlt":
        return frozenset()
    eos = mlt.read(path).eos
    return frozenset({eos} if eos >= 0 else ())
