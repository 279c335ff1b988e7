"""Making text from files safe to print: names, ids and metadata come from strangers."""

from __future__ import annotations

import unicodedata

_MAX_SHOWN = 200
# Control, format (bidirectional overrides too), surrogate, private, unassigned, line and paragraph separators.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str, max_chars: int = _MAX_SHOWN) -> str:
    r"""``text`` with everything that could steer a terminal written as ``\xNN`` or ``\u{N}``, cut to ``max_chars``."""
    shown = "".join(_escape(c) if unicodedata.category(c) in _UNPRINTABLE else c for c in text[:max_chars])
    return shown + ("…" if len(text) > max_chars else "")


# Format characters that reorder what follows them; the others (joiners, tags) shape emoji and scripts.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def terminal_text(text: str) -> str:
    r"""Running text that is safe on a terminal: control and reordering characters are written as in :func:`printable`.

    Newlines, tabs, joiners and everything else stay as they are; nothing is cut.
    """
    return "".join(_escape(c) if c in _REORDERING or _steers(c) else c for c in text)


def _steers(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")


def printable_bytes(data: bytes, max_chars: int = _MAX_SHOWN) -> str:
    """:func:`printable` of bytes that should be UTF-8; invalid bytes are shown as ``\\xNN``."""
    return printable(data[: 4 * max_chars].decode("utf-8", errors="backslashreplace"), max_chars)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{{{code:x}}}"


def counted(n: int, noun: str, plural: str = "") -> str:
    """A number and what it counts: "1 token", "2,000 tokens"."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def human_bytes(n_bytes: int) -> str:
    """``n_bytes`` in decimal units with three digits: 1536 -> '1.54 KB'."""
    if n_bytes < 1000:
        return f"{n_bytes} B"
    value = float(n_bytes)
    for unit in ("KB", "MB", "GB"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:.3g} TB"
