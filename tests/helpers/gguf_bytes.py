"""GGUF files byte by byte, for tests of the reader: independent of the gguf package and of the reader."""

from __future__ import annotations

import struct
from typing import Any


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind: int, item: Any) -> bytes:
    """A metadata value of type number ``kind``; 9: (inner type, items)."""
    if kind == 8:
        return text(item)
    if kind == 9:
        inner, items = item
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, i) for i in items)
    code = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind]
    return struct.pack("<" + code, item)


def pair(key: str, kind: int, item: Any) -> bytes:
    return text(key) + struct.pack("<I", kind) + value(kind, item)


def description(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """``dims`` from the innermost out, as the file has them."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCHITECTURE = pair("general.architecture", 8, "llama")


def gguf(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    pairs = [ARCHITECTURE] if pairs is None else pairs
    tensors = tensors or []
    head = struct.pack(
        "<4sIQQ",
        b"GGUF",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    start = head + b"".join(pairs) + b"".join(tensors)
    return start + bytes(-len(start) % alignment) + data
