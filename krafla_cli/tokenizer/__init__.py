"""Tokenizers: tokenizer.json <-> .mlt -> `tokenizers.Tokenizer`; chat templates; streaming decode.

The names below are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from krafla_cli.tokenizer.chat import ChatEncoder, encode_chat
    from krafla_cli.tokenizer.convert import convert_tokenizer, convert_with_proof
    from krafla_cli.tokenizer.load import load_tokenizer
    from krafla_cli.tokenizer.stream import StopText, StreamDecoder

_MODULES = {
    "ChatEncoder": "chat",
    "StreamDecoder": "stream",
    "convert_tokenizer": "convert",
    "convert_with_proof": "convert",
    "StopText": "stream",
    "encode_chat": "chat",
    "load_tokenizer": "load",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "ChatEncoder",
    "StopText",
    "StreamDecoder",
    "convert_tokenizer",
    "convert_with_proof",
    "encode_chat",
    "load_tokenizer",
]
