"""From a .mlt to a `tokenizers.Tokenizer` that encodes as the format says."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from krafla_cli.errors import UnsupportedError
from krafla_cli.formats.mlt import SPACE_MARK, Flag, Kind, Mlt, describe_bytes, missing_bytes
from krafla_cli.formats.text import printable
from krafla_cli.tokenizer.pieces import is_control, spelling

# The three splitting rules of the format (specification, "flags"), as Oniguruma patterns.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SINGLE_DIGIT_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def build_tokenizer(mlt: Mlt, name: str = "the tokenizer") -> Tokenizer:
    """A tokenizer with the ids and merges of ``mlt``; its decoder gives the text without the ▁ prefix.

    Raises UnsupportedError where the tokens leave open how text is encoded (see ``_vocabulary``).
    """
    missing = missing_bytes(mlt.tokens, mlt.kind)
    if missing:
        raise UnsupportedError(f"{printable(name)}: no token for {describe_bytes(missing)}, so text cannot be encoded")
    if Flag.IGNORE_MERGES | Flag.PREFIX_FIRST_ONLY in mlt.flags and mlt.kind == Kind.SENTENCEPIECE:
        # Text such as "<0x41>" after an added token would be looked up whole and found: as the byte token.
        raise UnsupportedError(f"{printable(name)}: flags 2 and 4 together are not encoded exactly here")
    vocab = _vocabulary(mlt, name)
    tokenizer = Tokenizer(_model(mlt, vocab, name))
    _set_pipeline(tokenizer, mlt)
    _add_tokens(tokenizer, list(mlt.added().values()))
    if Flag.ADD_BOS in mlt.flags:
        tokenizer.post_processor = _bos_first(mlt)
    return tokenizer


def _vocabulary(mlt: Mlt, name: str) -> dict[str, int]:
    """Spelling -> id. Raises UnsupportedError when two tokens have the same spelling."""
    pieces = [(spelling(token, mlt.kind), i) for i, token in enumerate(mlt.tokens) if token.data]
    vocab = dict(pieces)
    if len(vocab) == len(pieces):
        return vocab
    piece, i = next((p, i) for p, i in pieces if vocab[p] != i)
    raise UnsupportedError(
        f"{printable(name)}: tokens {i} and {vocab[piece]} are both spelled {printable(piece, 40)!r} "
        "in the tokenizers library, which encodes text here"
    )


def _model(mlt: Mlt, vocab: dict[str, int], name: str) -> models.BPE:
    spellings = [""] * len(mlt.tokens)
    for piece, i in vocab.items():
        spellings[i] = piece
    merges = []
    for rank, (left, right, merged) in enumerate(mlt.merges.tolist()):
        if spellings[left] + spellings[right] != spellings[merged]:
            raise UnsupportedError(f"{printable(name)}: merge {rank} is of added or byte tokens, which text never is")
        merges.append((spellings[left], spellings[right]))
    return models.BPE(
        vocab=vocab,
        merges=list(dict.fromkeys(merges)),  # of a repeated pair the lowest rank counts
        byte_fallback=mlt.kind == Kind.SENTENCEPIECE,
        ignore_merges=Flag.IGNORE_MERGES in mlt.flags,
    )


def _set_pipeline(tokenizer: Tokenizer, mlt: Mlt) -> None:
    if mlt.kind == Kind.BYTE_LEVEL:
        if Flag.NFC in mlt.flags:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _byte_level(mlt.flags)
        tokenizer.decoder = decoders.ByteLevel()
        return
    if Flag.PREFIX_FIRST_ONLY in mlt.flags:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)]
        )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def _byte_level(flags: Flag) -> pre_tokenizers.PreTokenizer:
    if Flag.GPT2_REGEX in flags:
        pattern = GPT2_PATTERN
    else:
        pattern = SINGLE_DIGIT_PATTERN if Flag.SINGLE_DIGITS in flags else LLAMA3_PATTERN
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    if Flag.SPLIT_DIGITS in flags:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    return pre_tokenizers.Sequence(steps)


def _add_tokens(tokenizer: Tokenizer, contents: list[str]) -> None:
    tokens = [AddedToken(c, normalized=False, special=is_control(c)) for c in contents]
    tokenizer.add_special_tokens([t for t in tokens if t.special])
    tokenizer.add_tokens([t for t in tokens if not t.special])


def _bos_first(mlt: Mlt) -> processors.TemplateProcessing:
    # The name "bos" is the template's own, so that nothing in the token's text can be taken for its syntax.
    bos = {"id": "bos", "ids": [mlt.bos], "tokens": [spelling(mlt.tokens[mlt.bos], mlt.kind)]}
    return processors.TemplateProcessing(single="bos $A", pair="bos $A bos:1 $B:1", special_tokens=[bos])
