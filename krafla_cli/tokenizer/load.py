"""Opening a tokenizer file of either kind."""

from __future__ import annotations

import os

from tokenizers import Tokenizer

from krafla_cli.formats import mlt
from krafla_cli.tokenizer.build import build_tokenizer
from krafla_cli.tokenizer.source import is_mlt, load_json, tokenizer_path


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a .mlt, a tokenizer.json, or a folder with a tokenizer.json.

    Raises FileError, FormatError, InputError (a model's file); UnsupportedError for a .mlt whose tokens leave open how
    text is encoded.

    >>> tokenizer = krafla_cli.load_tokenizer("demo.mlt")
    >>> tokenizer.decode(tokenizer.encode("a small boat").ids)
    'a small boat'
    """
    found = tokenizer_path(path)
    if is_mlt(found):
        return build_tokenizer(mlt.read(found), str(found))
    return load_json(found)
