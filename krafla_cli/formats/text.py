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


def printable_bytes(data: bytes, max_chars: int = _MAX_SHOWN) -> str:
    """:func:`printable` of bytes that should be UTF-8; invalid bytes are shown as ``\\xNN``."""
    return printable(data[: 4 * max_chars].decode("utf-8", errors="backslashreplace"), max_chars)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{{{code:x}}}"


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
