"""Reading what a checkpoint folder says about its tokenizer: tokenizer.json and the small files beside it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from krafla_cli.errors import FileError, FormatError, InputError
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.detect import format_of
from krafla_cli.formats.json_file import MAX_JSON_BYTES, parse_json, read_json_object
from krafla_cli.formats.text import printable
from krafla_cli.tokenizer.pipeline import parts

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_MAX_CONFIG_BYTES = 16 << 20
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


@dataclass(frozen=True)
class Source:
    """A tokenizer.json: the document, the tokenizer that the library makes of it, and tokenizer_config.json ({})."""

    path: Path
    document: dict[str, Any]
    tokenizer: Tokenizer
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return printable(str(self.path))


def tokenizer_path(path: str | os.PathLike[str]) -> Path:
    """``path`` itself, or the tokenizer.json in the folder ``path``. Raises FileError when there is none."""
    found = Path(path)
    if found.is_dir():
        found /= TOKENIZER_JSON
        if not found.exists():
            sentencepiece = (found.parent / "tokenizer.model").exists()
            hint = "; a tokenizer.model alone cannot be read, save it with transformers first" if sentencepiece else ""
            raise FileError(f"{printable(str(path))}: has no {TOKENIZER_JSON}{hint}")
    if not found.exists():
        raise FileError(f"cannot open {printable(str(found))}: No such file or directory")
    return found


def read_source(path: str | os.PathLike[str]) -> Source:
    """Reads a folder's tokenizer or a tokenizer.json. Raises FileError, FormatError, InputError (it is a .mlt)."""
    found = tokenizer_path(path)
    if is_mlt(found):
        raise InputError(f"{printable(str(found))} is a .mlt already; --encode, --decode and --dump show what is in it")
    document = read_json_object(found)
    return Source(found, document, load_json(found), read_config(found.parent))


def is_mlt(path: Path) -> bool:
    """Whether a file is a .mlt, else a tokenizer.json to be read. Raises FileError, InputError (a model's file)."""
    start = bytes(map_file(path)[:8])
    kind = format_of(start)
    if kind is None or kind.kind == "mlt":
        return kind is not None
    hint = {"mlb": "its tokenizer is beside it", "gguf": "mlb convert writes its tokenizer beside the model"}
    what = hint.get(kind.kind, "it is no tokenizer")
    raise InputError(f"{printable(str(path))} is a {kind.title}; {what}; give a tokenizer.json or a .mlt")


def source_of(document: dict[str, Any], config: dict[str, Any], name: str) -> Source:
    """A tokenizer.json that was made here, with its config; ``name`` is for errors. Raises FormatError."""
    return Source(Path(name), document, parse_tokenizer(json.dumps(document).encode(), printable(name)), config)


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of ``folder``, with what special_tokens_map.json adds; {} when there is neither."""
    config: dict[str, Any] = {}
    for name in (_SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG):
        if (folder / name).exists():
            config.update(read_json_object(folder / name, _MAX_CONFIG_BYTES))
    return config


def token_text(value: Any) -> str | None:
    """A special token as config files write it: text, or an object whose "content" is the text."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def load_json(path: Path) -> Tokenizer:
    """The library's tokenizer of a tokenizer.json. Raises FileError, FormatError."""
    return parse_tokenizer(map_file(path), printable(str(path)))


def parse_tokenizer(data: bytes | memoryview, name: str) -> Tokenizer:
    """The library's tokenizer of the document in ``data``, with its truncation and padding off (they are for training).

    ``name`` (already printable) is for errors. Raises FormatError.
    """
    if len(data) > MAX_JSON_BYTES:
        raise FormatError(f"{name}: {len(data)} bytes, a tokenizer.json has at most {MAX_JSON_BYTES}")
    _check_prefix(bytes(data), name)
    try:
        tokenizer = Tokenizer.from_buffer(bytes(data))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises plain Exception, and panics as BaseException
        reason = printable(" ".join(str(error).split()))
        raise FormatError(f"{name}: the tokenizers library cannot read it: {reason}") from error
    _check_post_processor(tokenizer, name)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_prefix(data: bytes, name: str) -> None:
    """Refuses merges that the library would panic at, with its own words on stderr: parts shorter than the prefix."""
    if not _PREFIX.search(data):
        return
    document = parse_json(data, name)
    model = document.get("model") if isinstance(document, dict) else None
    prefix, merges = (
        (model.get("continuing_subword_prefix"), model.get("merges")) if isinstance(model, dict) else (0, 0)
    )
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for i, merge in enumerate(merges):
        pieces = merge.split(" ") if isinstance(merge, str) else merge
        last = pieces[-1] if isinstance(pieces, list) and pieces else None
        if isinstance(last, str) and not last.startswith(prefix):
            raise FormatError(
                f"{name}: merge {i}: {printable(last)!r} does not begin with the continuing_subword_prefix "
                f"{printable(prefix)!r}"
            )


def _check_post_processor(tokenizer: Tokenizer, name: str) -> None:
    """Refuses a template with tokens that it does not define; the library reads it, and panics when it encodes."""
    for part in parts(tokenizer, "post_processor"):
        if part["type"] != "TemplateProcessing":
            continue
        steps = [step["SpecialToken"]["id"] for step in part["single"] + part["pair"] if "SpecialToken" in step]
        unknown = next((token for token in steps if token not in part["special_tokens"]), None)
        if unknown is not None:
            raise FormatError(
                f"{name}: post_processor: the token {printable(unknown)!r} is not among its special_tokens"
            )
