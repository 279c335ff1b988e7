"""Texts to token ids as section 5.2 of the LEMB specification says, through the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from krafla_cli.embed.texts import check_unicode
from krafla_cli.formats.lemb import LembModel


class TextEncoder:
    """The tokenizer of a model: [CLS] pieces [SEP], cut to max_seq_len; special tokens in a text are plain text."""

    def __init__(self, model: LembModel) -> None:
        config, header = model.tokenizer, model.header
        self.cls, self.sep, self.pad = config.cls_token_id, config.sep_token_id, config.pad_token_id
        self.max_seq_len = header.max_seq_len
        self.library = Tokenizer(
            WordPiece(
                vocab={token: token_id for token_id, token in enumerate(model.vocab)},
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

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, wrapped and cut. Raises InputError for a text that is not valid Unicode."""
        try:
            encoded = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # what the library makes of half a surrogate pair
            for number, text in enumerate(texts, 1):
                check_unicode(text, f"text {number}")
            raise
        return [[self.cls, *e.ids, self.sep][: self.max_seq_len] for e in encoded]

    def active_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """``ids`` cut to as many as are not padding, as section 6.1 counts them."""
        return [ids[: len(ids) - ids.count(self.pad)] for ids in self.ids(texts)]
