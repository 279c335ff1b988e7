"""Reading JSON files from strangers: bounded size and depth, duplicate keys refused, errors that name the file."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import numpy as np

from krafla_cli.errors import FileError, FormatError, os_reason
from krafla_cli.formats.cursor import open_regular
from krafla_cli.formats.text import printable

MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json in use is near 35 MB
MAX_DEPTH = 100  # of documents up to _MAX_MEASURED bytes; the parser itself gives up at a thousand
_MAX_MEASURED = 4 << 20
# Bytes that a parsed document takes: of a list, an object, a text, a place in a list or an object.
_LIST_BYTES, _OBJECT_BYTES, _TEXT_BYTES, _PLACE_BYTES = 56, 64, 50, 8
_SURROGATE_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_MEMORY_FACTOR, _MEMORY_FLOOR = 8, 48 << 20


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES, strict: bool = False) -> Any:
    """The document in ``path``; ``strict`` as for :func:`parse_json`.

    Raises FileError (cannot be read), FormatError (not JSON, too large, too deep).
    """
    name = printable(str(path))
    with open_regular(path) as f:
        n_bytes = os.fstat(f.fileno()).st_size
        if n_bytes > max_bytes:
            raise FormatError(f"{name}: {n_bytes} bytes, at most {max_bytes} are read")
        try:
            data = f.read(n_bytes)
        except OSError as error:
            raise FileError(f"cannot read {name}: {os_reason(error)}") from error
    return parse_json(data, name, strict)


def read_json_object(
    path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES, strict: bool = False
) -> dict[str, Any]:
    """As :func:`read_json`, where the document must be an object ({...})."""
    document = read_json(path, max_bytes, strict)
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


def parse_json(data: bytes | memoryview, name: str, strict: bool = False) -> Any:
    """The document in ``data``; ``name`` (already printable) is for errors. Raises FormatError.

    ``strict`` refuses NaN and Infinity, which are no JSON, but which Python writes and checkpoints' configs hold.
    """
    data = bytes(data)
    _check_size(data, name)
    _check_surrogates(data, name)
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique_keys, **(_STRICT if strict else {}))
    except UnicodeDecodeError as error:
        raise FormatError(f"{name}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise FormatError(f"{name}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise FormatError(f"{name}: JSON nested too deeply") from error
    except _DuplicateKeyError as error:
        raise FormatError(f'{name}: key "{printable(str(error))}" occurs twice') from error
    except ValueError as error:  # an integer with thousands of digits, or what _refuse_constant refuses
        raise FormatError(f"{name}: not usable JSON: {printable(str(error))}") from error


def _check_size(data: bytes, name: str) -> None:
    """Refuses what is nested too deeply, or would take far more memory than the file: "[[],[],[],..."."""
    places, texts = data.count(b",") + data.count(b":"), data.count(b'"') // 2
    lists, objects = data.count(b"["), data.count(b"{")
    n_bytes = _LIST_BYTES * lists + _OBJECT_BYTES * objects + _TEXT_BYTES * texts + _PLACE_BYTES * places
    if n_bytes > _MEMORY_FACTOR * len(data) + _MEMORY_FLOOR:
        raise FormatError(f"{name}: {len(data)} bytes of JSON that would take some {n_bytes} bytes of memory")
    if lists + objects > MAX_DEPTH and len(data) <= _MAX_MEASURED:
        depth = _depth(data)
        if depth > MAX_DEPTH:
            raise FormatError(f"{name}: JSON nested {depth} deep, at most {MAX_DEPTH} are read")


def _check_surrogates(data: bytes, name: str) -> None:
    """Refuses the escape of half a surrogate pair: Python makes a text of it that no file name or encoder takes."""
    if b"\\u" in data:
        rest = _SURROGATE_PAIR.sub(b"", data.replace(b"\\\\", b""))
        found = _SURROGATE.search(rest)
        if found is not None:
            raise FormatError(f"{name}: {found[0].decode()} is half of a surrogate pair, and no character")


def _depth(data: bytes) -> int:
    """How deep lists and objects are nested in each other; brackets inside of texts do not count."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    chars = np.frombuffer(plain, np.uint8)
    steps = np.isin(chars, (ord("["), ord("{"))).astype(np.int8) - np.isin(chars, (ord("]"), ord("}")))
    steps[np.bitwise_xor.accumulate(chars == ord('"'))] = 0
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


class _DuplicateKeyError(Exception):
    pass


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_STRICT: dict[str, Any] = {"parse_constant": _refuse_constant}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKeyError(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return document
