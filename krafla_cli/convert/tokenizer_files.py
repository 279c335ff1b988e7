"""The tokenizer of a checkpoint folder as a file beside the model: .mlt where it is exact, else tokenizer.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from krafla_cli.convert.sources.folder import file_in
from krafla_cli.errors import FileError, UnsupportedError, os_reason
from krafla_cli.formats.text import printable
from krafla_cli.progress import Progress

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_JSON = "tokenizer.json"


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer to be written beside the model, as its ``suffix`` (".mlt" or ".tokenizer.json") and bytes.

    ``reason``: why the .mlt format cannot hold it, where it is a copy of tokenizer.json.
    """

    suffix: str
    data: bytes
    source: Path
    reason: str | None = None

    def load(self) -> tokenizers.Tokenizer:
        """The tokenizer, from the checkpoint's own file."""
        from krafla_cli.tokenizer import load_tokenizer

        return load_tokenizer(self.source)


def convert_folder_tokenizer(folder: Path, vocab: int, progress: Progress) -> TokenizerFile | None:
    """The folder's tokenizer for a model of ``vocab`` ids; None, with a warning, where there is no tokenizer.json.

    Raises FormatError (broken file), ShapeError (ids beyond the vocabulary that are not added tokens).
    """
    from krafla_cli.formats import mlt
    from krafla_cli.tokenizer import convert_tokenizer

    path = file_in(folder, TOKENIZER_JSON)
    if not path.exists():
        progress.warn(f"{printable(str(folder))}: no {TOKENIZER_JSON}: the model is written without a tokenizer")
        return None
    try:
        converted = convert_tokenizer(path, vocab_size=vocab, progress=progress)
        return TokenizerFile(".mlt", mlt.to_bytes(converted), path)
    except UnsupportedError as error:
        progress.info(f"the .mlt format cannot hold the tokenizer, so {TOKENIZER_JSON} is copied: {error}")
        return TokenizerFile(".tokenizer.json", _read(path), path, reason=str(error))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {printable(str(path))}: {os_reason(error)}") from error
