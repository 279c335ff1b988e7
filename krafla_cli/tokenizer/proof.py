"""The proof that a .mlt encodes as its source does: both encode the corpus, and any difference refuses the .mlt."""

from __future__ import annotations

from tokenizers import Tokenizer

from krafla_cli.errors import UnsupportedError
from krafla_cli.formats.mlt import Mlt
from krafla_cli.formats.text import printable
from krafla_cli.tokenizer.build import build_tokenizer
from krafla_cli.tokenizer.corpus import lines

_BATCH = 1000


def prove(mlt: Mlt, source: Tokenizer, n_lines: int = 2500) -> int:
    """Encodes at least ``n_lines`` lines with both; returns their number.

    Raises UnsupportedError with the first text on which they differ.
    """
    built = build_tokenizer(mlt)
    corpus = lines(mlt, n_lines)
    for start in range(0, len(corpus), _BATCH):
        batch = corpus[start : start + _BATCH]
        pairs = zip(batch, source.encode_batch_fast(batch), built.encode_batch_fast(batch), strict=True)
        for text, expected, got in pairs:
            if expected.ids != got.ids:
                raise UnsupportedError(_difference(text, expected.ids, got.ids))
    return len(corpus)


def _difference(text: str, expected: list[int], got: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    return (
        f"the .mlt would encode {printable(text, 60)!r} differently: at token {at} it has {got[at : at + 4]}, "
        f"the tokenizer.json {expected[at : at + 4]}; use the tokenizer.json itself"
    )
