"""Reading JSON files from strangers: bounded size and depth, duplicate keys refused, errors that name the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from krafla_cli.errors import FileError, FormatError, os_reason
from krafla_cli.formats.text import printable

MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json in use is near 35 MB


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The document in ``path``. Raises FileError (cannot be read), FormatError (not JSON, too large, too deep)."""
    name = printable(str(path))
    try:
        size = Path(path).stat().st_size
        if size > max_bytes:
            raise FormatError(f"{name}: {size} bytes, at most {max_bytes} are read")
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"cannot open {name}: {os_reason(error)}") from error
    return parse_json(data, name)


def read_json_object(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """As :func:`read_json`, where the document must be an object ({...})."""
    document = read_json(path, max_bytes)
    if not isinstance(document, dict):
        raise FormatError(f"{printable(str(path))}: must hold a JSON object, holds {shown_json(document)}")
    return document


def shown_json(value: Any, max_chars: int = 60) -> str:
    """A value from a JSON document as it stands there (null, true, "text"), cut and safe to print."""
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, list):
        shown = ", ".join("[...]" if isinstance(v, list) else shown_json(v, max_chars) for v in value[:5])
        return printable(f"[{shown}{', ...' if len(value) > 5 else ''}]", max_chars)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a number of over 70 digits"
    if isinstance(value, str):
        return f'"{printable(value, max_chars)}"'
    return printable(json.dumps(value), max_chars)


def parse_json(data: bytes | memoryview, name: str) -> Any:
    """The document in ``data``; ``name`` (already printable) is for errors. Raises FormatError."""
    try:
        return json.loads(bytes(data).decode("utf-8-sig"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise FormatError(f"{name}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise FormatError(f"{name}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise FormatError(f"{name}: JSON nested too deeply") from error
    except _DuplicateKeyError as error:
        raise FormatError(f'{name}: key "{printable(str(error))}" occurs twice') from error
    except ValueError as error:  # an integer with thousands of digits
        raise FormatError(f"{name}: not usable JSON: {printable(str(error))}") from error


class _DuplicateKeyError(Exception):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKeyError(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return document
