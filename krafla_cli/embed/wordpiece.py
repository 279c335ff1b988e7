"""Texts to token ids as section 5.2 of the LEMB specification says, through the ``tokenizers`` library.

The library is given words, and each word once: what the tokenizer does to the characters between two spaces (cleaning,
lower case, accents, punctuation, pieces) does not depend on what lies beyond them, so that a text's ids are those of
its words one after the other. Their ids are kept in one array, and a text's are gathered from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from krafla_cli.embed.texts import check_unicode
from krafla_cli.formats.lemb import LembModel

Ids = npt.NDArray[np.int64]

MAX_KNOWN_CHARS = 1 << 23  # of words whose ids are kept
FEW_WORDS = 64  # are encoded here, before the library's threads would have started


@dataclass(frozen=True)
class Tokens:
    """The ids of texts (or of words): those of text i are ids[starts[i] : starts[i + 1]]."""

    ids: Ids
    starts: Ids

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ids:
        return np.diff(self.starts)

    def of(self, text: int) -> list[int]:
        """The ids of one text."""
        ids: list[int] = self.ids[self.starts[text] : self.starts[text + 1]].tolist()
        return ids

    def first(self, n: Ids) -> Tokens:
        """The first n[i] ids of text i."""
        if (n >= self.lengths).all():
            return self
        position = np.arange(len(self.ids)) - np.repeat(self.starts[:-1], self.lengths)
        return Tokens(self.ids[position < np.repeat(n, self.lengths)], _starts(np.minimum(n, self.lengths)))

    def gathered(self, which: Ids) -> Tokens:
        """The texts ``which``, one after the other."""
        lengths = self.lengths[which]
        starts = _starts(lengths)
        places = np.arange(starts[-1]) + np.repeat(self.starts[which] - starts[:-1], lengths)
        return Tokens(self.ids[places], starts)


def _starts(lengths: Ids) -> Ids:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


class _Words:
    """Words with their ids: ``numbers`` gives a word's place in ``tokens``."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.tokens = Tokens(np.empty(0, np.int64), np.zeros(1, np.int64))
        self.n_chars = 0

    def add(self, words: Sequence[str], ids: Sequence[list[int]]) -> None:
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        new = np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum()))
        starts = np.concatenate((self.tokens.starts, self.tokens.starts[-1] + np.cumsum(lengths)))
        self.tokens = Tokens(np.concatenate((self.tokens.ids, new)), starts)
        self.numbers.update(zip(words, range(len(self.numbers), len(self.numbers) + len(words)), strict=True))
        self.n_chars += sum(map(len, words))


class TextEncoder:
    """The tokenizer of a model: [CLS] pieces [SEP], cut to max_seq_len; special tokens in a text are plain text.

    For one thread at a time.
    """

    def __init__(self, model: LembModel) -> None:
        config, header = model.tokenizer, model.header
        self.cls, self.sep, self.pad = config.cls_token_id, config.sep_token_id, config.pad_token_id
        self.max_seq_len = header.max_seq_len
        self.library = Tokenizer(
            WordPiece(
                vocab=dict(zip(model.vocab, range(len(model.vocab)), strict=True)),
                unk_token=model.vocab[config.unk_token_id],
                max_input_chars_per_word=config.max_input_chars_per_word,
                continuing_subword_prefix=config.prefix,
            )
        )
        self.library.normalizer = BertNormalizer(
            clean_text=True,
            handle_chinese_chars=True,
            strip_accents=header.strip_accents,
            lowercase=header.lower_case,
        )
        self.library.pre_tokenizer = BertPreTokenizer()
        self._known = _Words()

    def ids(self, texts: Sequence[str]) -> Tokens:
        """The ids of each text, wrapped and cut. Raises InputError for a text that is not valid Unicode."""
        split = [text.split(" ") for text in texts]
        words = list(chain.from_iterable(split))
        of_words = self._known_tokens(words, texts)
        # Every text has a word, if only an empty one.
        last_words = np.cumsum([0, *map(len, split)])
        tokens = self._wrapped(Tokens(of_words.ids, of_words.starts[last_words]))
        return tokens.first(np.full(len(texts), self.max_seq_len))

    def active_ids(self, texts: Sequence[str]) -> Tokens:
        """``ids`` cut to as many as are not padding, as section 6.1 counts them."""
        tokens = self.ids(texts)
        n_padding = np.diff(np.concatenate(([0], np.cumsum(tokens.ids == self.pad)))[tokens.starts])
        return tokens.first(tokens.lengths - n_padding) if n_padding.any() else tokens

    def _wrapped(self, tokens: Tokens) -> Tokens:
        """[CLS] ids [SEP] of each text."""
        starts = tokens.starts + 2 * np.arange(len(tokens) + 1)
        ids = np.empty(starts[-1], np.int64)
        ids[starts[:-1]] = self.cls
        ids[starts[1:] - 1] = self.sep
        ids[np.arange(len(tokens.ids)) + np.repeat(2 * np.arange(len(tokens)) + 1, tokens.lengths)] = tokens.ids
        return Tokens(ids, starts)

    def _known_tokens(self, words: Sequence[str], texts: Sequence[str]) -> Tokens:
        """The ids of each word, those of new ones by the library; the words come from ``texts``."""
        if self._known.n_chars > MAX_KNOWN_CHARS:
            self._known = _Words()
        numbers: list[int | None] = list(map(self._known.numbers.get, words))
        new = list({word for word, number in zip(words, numbers, strict=True) if number is None})
        if new:
            self._known.add(new, self._encoded(new, texts))
            learned = self._known.numbers
            numbers = [learned[w] if n is None else n for w, n in zip(words, numbers, strict=True)]
        return self._known.tokens.gathered(np.array(numbers, np.int64))

    def _encoded(self, words: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
        try:
            if len(words) <= FEW_WORDS:
                return [self.library.encode(word, add_special_tokens=False).ids for word in words]
            return [e.ids for e in self.library.encode_batch_fast(words, add_special_tokens=False)]
        except TypeError:  # what the library makes of half a surrogate pair
            for number, text in enumerate(texts, 1):
                check_unicode(text, f"text {number}")
            raise
