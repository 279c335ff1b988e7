"""The tokenizer of a GGUF file (tokenizer.ggml.*) to and from a tokenizer.json.

GGUF keeps pieces and merges, and names the rest ("pre": how text is split); what a name stands for is llama.cpp's
definition, and for normalization that of the tokenizer.json from which such files are made. Whatever is not listed
here is refused by name, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from krafla_cli.errors import FormatError, UnsupportedError
from krafla_cli.formats.mlt import SPACE_MARK
from krafla_cli.formats.text import printable
from krafla_cli.tokenizer.build import GPT2_PATTERN, LLAMA3_PATTERN, SINGLE_DIGIT_PATTERN
from krafla_cli.tokenizer.pieces import byte_token_value
from krafla_cli.tokenizer.regexes import same_meaning

Document = dict[str, Any]

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # values of tokenizer.ggml.model

_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_PATTERN = SINGLE_DIGIT_PATTERN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"^\s\p{L}", r"^\s\p{L}\p{M}")
_SEED_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Splitting:
    """What a value of tokenizer.ggml.pre stands for; ``digits``: single digits are split off first."""

    pattern: str
    ignore_merges: bool = False
    add_bos: bool = False
    digits: bool = False
    nfc: bool = False


# The first name with a meaning is the one that is written.
_SPLITTINGS: dict[str, _Splitting] = {
    "llama-bpe": _Splitting(LLAMA3_PATTERN, ignore_merges=True, add_bos=True),
    "llama3": _Splitting(LLAMA3_PATTERN, ignore_merges=True, add_bos=True),
    "llama-v3": _Splitting(LLAMA3_PATTERN, ignore_merges=True, add_bos=True),
    "glm4": _Splitting(LLAMA3_PATTERN, ignore_merges=True),
    "smaug-bpe": _Splitting(LLAMA3_PATTERN),
    "dbrx": _Splitting(LLAMA3_PATTERN),
    "chatglm-bpe": _Splitting(LLAMA3_PATTERN),
    "qwen2": _Splitting(SINGLE_DIGIT_PATTERN, nfc=True),
    "qwen35": _Splitting(_QWEN35_PATTERN, nfc=True),
    "deepseek-r1-qwen": _Splitting(SINGLE_DIGIT_PATTERN),
    "gpt-2": _Splitting(GPT2_PATTERN),
    "smollm": _Splitting(GPT2_PATTERN, digits=True),
    "starcoder": _Splitting(GPT2_PATTERN, digits=True),
    "tekken": _Splitting(_TEKKEN_PATTERN, ignore_merges=True, add_bos=True),
    "seed-coder": _Splitting(_SEED_PATTERN),
}


@dataclass(frozen=True)
class GgmlTokenizer:
    """The values of tokenizer.ggml.* and tokenizer.huggingface.json.

    ``special``: "bos", "eos", "unknown", "padding", "eot", "eom" -> id. ``add_bos``, ``add_space_prefix`` None: not
    stated. ``scores`` are those of SentencePiece; ``merges`` those of byte-level BPE, "a b".
    ``swallows_blanks``: blanks after an added token are dropped (llama.cpp's rule for Phi-3, which no file states).
    """

    model: str
    tokens: Sequence[str]
    types: Sequence[int]
    pre: str | None = None
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    special: Mapping[str, int] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool = False
    add_space_prefix: bool | None = None
    hugging_face: str | None = None
    swallows_blanks: bool = False

    def text(self, name: str) -> str | None:
        """The text of a special token."""
        i = self.special.get(name)
        return self.tokens[i] if i is not None and 0 <= i < len(self.tokens) else None

    def config(self) -> dict[str, str]:
        """What tokenizer_config.json says of the special tokens."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        texts = {key: self.text(name) for key, name in names.items()}
        return {key: text for key, text in texts.items() if text is not None}


# ---------------------------------------------------------------------------------------------------------------------
# GGUF -> tokenizer.json


def document_of(ggml: GgmlTokenizer, name: str) -> Document:
    """The tokenizer.json of a GGUF file; ``name`` (printable) is for errors.

    Raises FormatError (contradictions), UnsupportedError naming the model or splitting that is not known.
    """
    if len(ggml.types) != len(ggml.tokens):
        raise FormatError(f"{name}: {len(ggml.types)} token types for {len(ggml.tokens)} tokens")
    if ggml.hugging_face is not None:
        return _given_document(ggml, name)
    if ggml.model == BYTE_LEVEL:
        return _byte_level_document(ggml, name)
    if ggml.model == SENTENCEPIECE:
        return _sentencepiece_document(ggml, name)
    raise UnsupportedError(f'{name}: tokenizer.ggml.model "{printable(ggml.model)}" is not supported')


def _given_document(ggml: GgmlTokenizer, name: str) -> Document:
    """tokenizer.huggingface.json, which must have the tokens that tokenizer.ggml.tokens has."""
    where = f"{name}: tokenizer.huggingface.json"
    try:
        document = json.loads(ggml.hugging_face or "")
        vocab = dict(document["model"]["vocab"])
        vocab.update({t["content"]: t["id"] for t in document.get("added_tokens") or []})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{where}: is no tokenizer.json with a vocabulary") from error
    for text, i in vocab.items():
        if not isinstance(i, int) or not 0 <= i < len(ggml.tokens):
            continue  # ids beyond the model's rows
        if text not in (ggml.tokens[i], ggml.tokens[i].replace(" ", SPACE_MARK)):
            raise FormatError(
                f'{where}: token {i} is "{printable(text, 40)}", tokenizer.ggml.tokens has '
                f'"{printable(ggml.tokens[i], 40)}"'
            )
    return dict(document)


def _byte_level_document(ggml: GgmlTokenizer, name: str) -> Document:
    splitting = _SPLITTINGS.get(ggml.pre or "")
    if splitting is None:
        stated = f'"{printable(ggml.pre)}"' if ggml.pre is not None else "not stated"
        known = ", ".join(_SPLITTINGS)
        raise UnsupportedError(f"{name}: tokenizer.ggml.pre is {stated}, known are {known}")
    steps: list[Document] = [
        {"type": "Split", "pattern": {"Regex": splitting.pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    if splitting.digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    add_bos = splitting.add_bos if ggml.add_bos is None else ggml.add_bos
    return _document(
        ggml,
        name,
        normalizer={"type": "NFC"} if splitting.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        add_bos=add_bos,
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model={
            "merges": [m.split(" ", 1) for m in ggml.merges],
            "ignore_merges": splitting.ignore_merges,
            "byte_fallback": False,
        },
    )


def _sentencepiece_document(ggml: GgmlTokenizer, name: str) -> Document:
    prefix = ggml.add_space_prefix is not False
    replace: Document = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    steps = [{"type": "Prepend", "prepend": SPACE_MARK}, replace] if prefix else [replace]
    decoders: list[Document] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _document(
        ggml,
        name,
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer=None,
        add_bos=ggml.add_bos is not False,
        decoder={"type": "Sequence", "decoders": decoders},
        model={"merges": _merges_of_scores(ggml, name), "ignore_merges": False, "byte_fallback": True},
    )


def _document(
    ggml: GgmlTokenizer,
    name: str,
    *,
    normalizer: Document | None,
    pre_tokenizer: Document | None,
    add_bos: bool,
    decoder: Document,
    model: Document,
) -> Document:
    vocab = _vocabulary(ggml, name)
    unknown = ggml.text("unknown") if model["byte_fallback"] else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(ggml),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(ggml, add_bos, name),
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown if unknown in vocab else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": bool(model["byte_fallback"]),
            "byte_fallback": model["byte_fallback"],
            "ignore_merges": model["ignore_merges"],
            "vocab": vocab,
            "merges": [m for m in model["merges"] if m[0] in vocab and m[1] in vocab and m[0] + m[1] in vocab],
        },
    }


def _vocabulary(ggml: GgmlTokenizer, name: str) -> dict[str, int]:
    """Text -> id, without fillers that make up for rows without a token. Raises FormatError for a repeated text."""
    vocab: dict[str, int] = {}
    for i, (text, kind) in enumerate(zip(_pieces(ggml), ggml.types, strict=True)):
        if kind != UNUSED and vocab.setdefault(text, i) != i:
            raise FormatError(f'{name}: tokens {vocab[text]} and {i} are both "{printable(text, 40)}"')
    return vocab


def _pieces(ggml: GgmlTokenizer) -> list[str]:
    """The tokens as the vocabulary spells them: GGUF writes SentencePiece's runs of blanks with spaces."""
    if ggml.model != SENTENCEPIECE:
        return list(ggml.tokens)
    both = zip(ggml.tokens, ggml.types, strict=True)
    return [t.replace(" ", SPACE_MARK) if kind == USER_DEFINED and _is_blank(t) else t for t, kind in both]


def _is_blank(text: str) -> bool:
    return not text.strip(f" {SPACE_MARK}")


def _added_tokens(ggml: GgmlTokenizer) -> list[Document]:
    settings = {"single_word": False, "lstrip": False, "normalized": False}

    def swallows(text: str) -> bool:
        return ggml.swallows_blanks and text not in ("<unk>", "<s>", "<|endoftext|>")

    return [
        {"id": i, "content": text, **settings, "rstrip": swallows(text), "special": kind != USER_DEFINED}
        for i, (text, kind) in enumerate(zip(ggml.tokens, ggml.types, strict=True))
        if kind in (CONTROL, UNKNOWN) or (kind == USER_DEFINED and not _is_blank(text))
    ]


def _post_processor(ggml: GgmlTokenizer, add_bos: bool, name: str) -> Document | None:
    before = [_special(ggml, "bos", name)] if add_bos else []
    after = [_special(ggml, "eos", name)] if ggml.add_eos else []
    if not before and not after:
        return None
    used = {text: {"id": text, "ids": [i], "tokens": [text]} for i, text in (*before, *after)}

    def steps(sequence: str, type_id: int) -> list[Document]:
        text = {"Sequence": {"id": sequence, "type_id": type_id}}
        around = [[{"SpecialToken": {"id": t, "type_id": type_id}} for _, t in side] for side in (before, after)]
        return [*around[0], text, *around[1]]

    pair = [*steps("A", 0), *steps("B", 1)]
    return {"type": "TemplateProcessing", "single": steps("A", 0), "pair": pair, "special_tokens": used}


def _special(ggml: GgmlTokenizer, kind: str, name: str) -> tuple[int, str]:
    text = ggml.text(kind)
    if text is None:
        raise FormatError(f"{name}: tokenizer.ggml.add_{kind}_token is true, but {kind}_token_id names no token")
    return ggml.special[kind], text


def _merges_of_scores(ggml: GgmlTokenizer, name: str) -> list[tuple[str, str]]:
    """The merge rules of SentencePiece's scores: every way to put a piece together, the best piece first.

    Where one piece can be made in several ways, files in use differ: those with a ▁ prefix (Llama) go by the ids of
    left and right piece, those without (Gemma) take the longest left piece first.
    """
    if len(ggml.scores) != len(ggml.tokens):
        raise FormatError(f"{name}: {len(ggml.scores)} scores for {len(ggml.tokens)} tokens")
    usable = (NORMAL, USER_DEFINED)
    pieces = {t: i for i, (t, kind) in enumerate(zip(_pieces(ggml), ggml.types, strict=True)) if kind in usable}
    by_length = ggml.add_space_prefix is False
    rules = []
    for piece, i in pieces.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                order = (-len(left), -len(right)) if by_length else (pieces[left], pieces[right])
                rules.append((-ggml.scores[i], *((*order, i) if by_length else (i, *order)), left, right))
    rules.sort()
    return [(rule[-2], rule[-1]) for rule in rules]


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer -> GGUF


@dataclass(frozen=True)
class Exported:
    """A tokenizer as GGUF holds it, and remarks on what llama.cpp does otherwise.

    ``ggml.model`` is "no_vocab" where llama.cpp has no such splitting: then only the tokenizer.json is in the file.
    """

    ggml: GgmlTokenizer
    remarks: tuple[str, ...] = ()


def ggml_of(tokenizer: Tokenizer, n_rows: int, special: Mapping[str, int], text: str | None = None) -> Exported:
    """``tokenizer`` for a model of ``n_rows`` ids; ``special`` as in :class:`GgmlTokenizer`.

    ``text``: its tokenizer.json, where there is one; else it is made. Raises UnsupportedError for a tokenizer that is
    no BPE.
    """
    document = json.loads(tokenizer.to_str())
    if document["model"]["type"] != "BPE":
        raise UnsupportedError(f"the tokenizer is {document['model']['type']}, not BPE: GGUF has no place for it here")
    texts, types = _tokens_of(document, tokenizer, n_rows, special)
    remarks: list[str] = []
    common: dict[str, Any] = {
        "tokens": texts,
        "types": types,
        "special": {k: i for k, i in special.items() if 0 <= i < n_rows},
        "add_bos": len(tokenizer.encode("", add_special_tokens=True).ids) > 0,
        "hugging_face": text or json.dumps(document, ensure_ascii=False, separators=(",", ":")),
    }
    merges = [tuple(m) if not isinstance(m, str) else tuple(m.split(" ", 1)) for m in document["model"]["merges"]]
    steps = _steps(document["pre_tokenizer"], "pretokenizers")
    if any(s["type"] == "ByteLevel" for s in steps):
        pre = _pre_name(document, steps, remarks)
        if pre is None:
            return Exported(GgmlTokenizer("no_vocab", **common), tuple(remarks))
        joined = [" ".join(m) for m in merges]
        return Exported(GgmlTokenizer(BYTE_LEVEL, pre=pre, merges=joined, **common), tuple(remarks))
    prefix = _space_prefix(document, steps, remarks)
    if prefix is None or not document["model"]["byte_fallback"]:
        remarks.append("llama.cpp has no tokenizer like this one: only tokenizer.huggingface.json holds it")
        return Exported(GgmlTokenizer("no_vocab", **common), tuple(remarks))
    scores = _scores_of_merges(texts, merges)
    return Exported(GgmlTokenizer(SENTENCEPIECE, scores=scores, add_space_prefix=prefix, **common), tuple(remarks))


def _tokens_of(
    document: Document, tokenizer: Tokenizer, n_rows: int, special: Mapping[str, int]
) -> tuple[list[str], list[int]]:
    texts, types = [f"[PAD{i}]" for i in range(n_rows)], [UNUSED] * n_rows
    byte_fallback = document["model"]["byte_fallback"]
    for text, i in document["model"]["vocab"].items():
        if i < n_rows:
            texts[i] = text
            types[i] = BYTE if byte_fallback and byte_token_value(text) is not None else NORMAL
    for i, token in tokenizer.get_added_tokens_decoder().items():
        if i < n_rows:
            texts[i], types[i] = token.content, CONTROL if token.special else USER_DEFINED
    unknown = special.get("unknown")
    if byte_fallback and unknown is not None and 0 <= unknown < n_rows and types[unknown] == CONTROL:
        types[unknown] = UNKNOWN
    return texts, types


def _steps(part: Document | None, children: str) -> list[Document]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [leaf for child in part[children] for leaf in _steps(child, children)]


def _pre_name(document: Document, steps: list[Document], remarks: list[str]) -> str | None:
    """The name under which llama.cpp knows how the tokenizer splits; None, with a remark, where it does not."""
    normalizers = [s["type"] for s in _steps(document["normalizer"], "normalizers")]
    found = _splitting_of(steps)
    if found is not None and set(normalizers) <= {"NFC"}:
        pattern, digits = found
        wanted = (digits, bool(document["model"].get("ignore_merges")))
        for name, s in _SPLITTINGS.items():
            if (s.digits, s.ignore_merges) == wanted and (pattern == s.pattern or same_meaning(pattern, s.pattern)):
                if normalizers:
                    remarks.append("llama.cpp does not normalize text to NFC, as this tokenizer does")
                return name
    remarks.append("llama.cpp splits no text as this tokenizer does: only tokenizer.huggingface.json holds it")
    return None


def _splitting_of(steps: list[Document]) -> tuple[str, bool] | None:
    """The pattern of a byte-level pre-tokenizer, and whether digits are split off first; None for any other."""
    digits = steps[0]["type"] == "Digits" and steps[0]["individual_digits"]
    steps = steps[1:] if digits else steps
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1 and last["use_regex"]:
        return GPT2_PATTERN, digits
    if len(steps) != 2 or steps[0]["type"] != "Split" or last["use_regex"]:
        return None
    split = steps[0]
    # The patterns match every text without a gap, so that keeping the matches only is the same as isolating them.
    keeps = split["behavior"] == "Isolated" or (split["behavior"], split["invert"]) == ("Removed", True)
    return (split["pattern"]["Regex"], digits) if keeps and "Regex" in split["pattern"] else None


def _space_prefix(document: Document, steps: list[Document], remarks: list[str]) -> bool | None:
    """Whether ▁ is put before the text; None where llama.cpp knows no such rule."""
    normalizers = _steps(document["normalizer"], "normalizers")
    kinds = sorted(n["type"] for n in normalizers)
    if not steps and kinds == ["Prepend", "Replace"]:
        return True
    if kinds == ["Replace"] and all(s["type"] == "Split" and s["pattern"] == {"String": " "} for s in steps):
        return False  # after the normalizer there is no space to split at
    if not kinds and [s["type"] for s in steps] == ["Metaspace"] and steps[0]["prepend_scheme"] == "first":
        remarks.append("llama.cpp puts ▁ after each special token too, this tokenizer only before the text")
        return True
    return None


def _scores_of_merges(texts: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """A score for each token that orders pieces as the merge rules do; pieces that no rule makes come last.

    Pieces whose rules are mixed with each other share a score.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        first.setdefault(left + right, rank)
        last[left + right] = rank
    scores: dict[str, float] = {}
    end, score = -1, 0.0
    for piece, rank in first.items():
        if rank > end:
            score -= 1.0
        scores[piece] = score
        end = max(end, last[piece])
    return [scores.get(text, score - 1.0) for text in texts]
