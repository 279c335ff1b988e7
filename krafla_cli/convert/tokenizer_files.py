"""The tokenizer of a checkpoint as a file beside the model: .mlt where it is exact, else tokenizer.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from krafla_cli.convert.sources.folder import file_in
from krafla_cli.errors import FileError, FormatError, UnsupportedError, os_reason
from krafla_cli.formats.gguf import GgufFile
from krafla_cli.formats.text import printable
from krafla_cli.progress import Progress

if TYPE_CHECKING:
    import tokenizers

    from krafla_cli.tokenizer.ggml import GgmlTokenizer
    from krafla_cli.tokenizer.source import Source as TokenizerSource

TOKENIZER_JSON = "tokenizer.json"


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer to be written beside the model, as its ``suffix`` (".mlt" or ".tokenizer.json") and bytes.

    ``tokenizer``: the checkpoint's own. ``reason``: why the .mlt format cannot hold it, where it is a tokenizer.json.
    """

    suffix: str
    data: bytes
    tokenizer: tokenizers.Tokenizer
    reason: str | None = None


def folder_tokenizer(folder: Path, vocab: int, progress: Progress) -> TokenizerFile | None:
    """The folder's tokenizer for a model of ``vocab`` ids; None, with a warning, where there is no tokenizer.json.

    Raises FormatError (broken file), ShapeError (ids beyond the vocabulary that are not added tokens).
    """
    path = file_in(folder, TOKENIZER_JSON)
    if not path.exists():
        progress.warn(f"{printable(str(folder))}: no {TOKENIZER_JSON}: the model is written without a tokenizer")
        return None
    from krafla_cli.tokenizer.source import read_source

    return _converted(read_source(path), _read(path), vocab, progress)


def gguf_tokenizer(model: GgufFile, vocab: int, progress: Progress) -> TokenizerFile | None:
    """The tokenizer in the metadata; None, with a warning, where there is none, or none of a known kind.

    Raises FormatError (contradictions), ShapeError as :func:`folder_tokenizer`.
    """
    from krafla_cli.tokenizer.ggml import document_of
    from krafla_cli.tokenizer.source import source_of

    ggml = _ggml_tokenizer(model)
    if ggml is None:
        progress.warn(f"{model.title}: no tokenizer.ggml.tokens: the model is written without a tokenizer")
        return None
    try:
        document = document_of(ggml, model.title)
    except UnsupportedError as error:
        progress.warn(f"{error}: the model is written without a tokenizer")
        return None
    data = (ggml.hugging_face or json.dumps(document, ensure_ascii=False, indent=2)).encode()
    return _converted(source_of(document, dict(ggml.config()), model.title), data, vocab, progress)


def _converted(source: TokenizerSource, json_data: bytes, vocab: int, progress: Progress) -> TokenizerFile:
    """The .mlt where it is exact, else ``json_data`` with a remark."""
    from krafla_cli.formats import mlt
    from krafla_cli.tokenizer.convert import convert_source

    try:
        conversion = convert_source(source, vocab)
    except UnsupportedError as error:
        progress.info(f"the .mlt format cannot hold the tokenizer, so {TOKENIZER_JSON} is copied: {error}")
        return TokenizerFile(".tokenizer.json", json_data, source.tokenizer, reason=str(error))
    for warning in conversion.warnings:
        progress.warn(warning)
    return TokenizerFile(".mlt", mlt.to_bytes(conversion.mlt), source.tokenizer)


def _ggml_tokenizer(model: GgufFile) -> GgmlTokenizer | None:
    """The tokenizer in the metadata; None where it has no tokens."""
    from krafla_cli.tokenizer.ggml import NORMAL, GgmlTokenizer

    tokens = model.get("tokenizer.ggml.tokens", list)
    if tokens is None:
        return None
    kinds = ("bos", "eos", "unknown", "padding", "eot", "eom")
    ids = {kind: model.get(f"tokenizer.ggml.{kind}_token_id", int) for kind in kinds}
    name = (model.get("general.name", str) or "").lower().replace(" ", "-")
    return GgmlTokenizer(
        model=model.get("tokenizer.ggml.model", str) or "",
        tokens=tokens,
        types=_numbers(model, "tokenizer.ggml.token_type") or [NORMAL] * len(tokens),
        pre=model.get("tokenizer.ggml.pre", str),
        merges=model.get("tokenizer.ggml.merges", list) or [],
        scores=_numbers(model, "tokenizer.ggml.scores"),
        special={kind: i for kind, i in ids.items() if i is not None},
        add_bos=model.get("tokenizer.ggml.add_bos_token", bool),
        add_eos=model.get("tokenizer.ggml.add_eos_token", bool) or False,
        add_space_prefix=model.get("tokenizer.ggml.add_space_prefix", bool),
        hugging_face=model.get("tokenizer.huggingface.json", str),
        swallows_blanks="phi-3" in name or "phi3" in name,
    )


def _numbers(model: GgufFile, key: str) -> list[Any]:
    """An array of numbers as a list; empty where it is missing. Raises FormatError for anything else."""
    entry = model.metadata.get(key)
    if entry is None:
        return []
    if not hasattr(entry.value, "tolist"):
        raise FormatError(f"{model.title}: {key} at offset {entry.offset} is of type {entry.type_name}")
    return list(entry.value.tolist())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {printable(str(path))}: {os_reason(error)}") from error
