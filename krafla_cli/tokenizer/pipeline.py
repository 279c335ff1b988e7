"""What the parts of a tokenizer.json mean in terms of .mlt: its kind and flags, or the part that it cannot express.

Parts are read as the library itself states them after loading (defaults filled in, old spellings made new) and
recognised by what they do; anything else is refused with its name.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from krafla_cli.errors import UnsupportedError
from krafla_cli.formats.mlt import SPACE_MARK, Flag, Kind
from krafla_cli.formats.text import printable
from krafla_cli.tokenizer.build import GPT2_PATTERN, LLAMA3_PATTERN, SINGLE_DIGIT_PATTERN
from krafla_cli.tokenizer.regexes import same_meaning

Part = dict[str, Any]
_PATTERN_FLAGS = {
    LLAMA3_PATTERN: Flag(0),
    SINGLE_DIGIT_PATTERN: Flag.SINGLE_DIGITS,
    GPT2_PATTERN: Flag.GPT2_REGEX,
}
_CHILDREN = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


class Pipeline(NamedTuple):
    """``kind``, ``flags`` without IGNORE_MERGES, and the id of the BOS that encoding prepends (-1: none)."""

    kind: Kind
    flags: Flag
    bos: int


def parts(tokenizer: Tokenizer, name: str) -> list[Part]:
    """The parts of ``tokenizer``'s "normalizer", "pre_tokenizer", "post_processor" or "decoder", sequences opened."""
    component = getattr(tokenizer, name)
    return [] if component is None else _flat(json.loads(component.__getstate__()), _CHILDREN[name])


def _flat(part: Part, children: str) -> list[Part]:
    if part.get("type") != "Sequence":
        return [part]
    return [leaf for child in part.get(children, []) for leaf in _flat(child, children)]


def refuse(part: str, reason: str) -> UnsupportedError:
    """The error that says which part of a tokenizer.json .mlt cannot express."""
    return UnsupportedError(f"{part}: {printable(reason)}; .mlt cannot express it, use the tokenizer.json itself")


def shown(part: Part) -> str:
    """A part for an error message: its type and its own settings."""
    settings = ", ".join(f"{k}={v!r}" for k, v in part.items() if k != "type" and not isinstance(v, list))
    return f"{part.get('type')}({settings})"


def read_pipeline(tokenizer: Tokenizer) -> Pipeline:
    """Kind, flags and BOS of ``tokenizer``. Raises UnsupportedError that names the part .mlt has no place for."""
    model = json.loads(_model_settings(tokenizer))
    if model["type"] != "BPE":
        raise refuse("model", f"{model['type']}, not BPE")
    _check_model(model)
    byte_level = any(p["type"] == "ByteLevel" for p in parts(tokenizer, "pre_tokenizer"))
    kind = Kind.BYTE_LEVEL if byte_level else Kind.SENTENCEPIECE
    flags = _byte_level_flags(tokenizer) if byte_level else _sentencepiece_flags(tokenizer, model)
    bos = _added_bos(tokenizer)
    return Pipeline(kind, flags | (Flag.ADD_BOS if bos >= 0 else Flag(0)), bos)


def _model_settings(tokenizer: Tokenizer) -> str:
    """The model's settings as JSON, without its vocabulary."""
    model = tokenizer.model
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    settings = {name: getattr(model, name, None) for name in names}
    return json.dumps({"type": type(model).__name__, **settings})


def _check_model(model: Part) -> None:
    if model["dropout"]:
        raise refuse("model", f"dropout={model['dropout']}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model[name]:
            raise refuse("model", f"{name}={model[name]!r}")


def _byte_level_flags(tokenizer: Tokenizer) -> Flag:
    flags = Flag(0)
    for part in parts(tokenizer, "normalizer"):
        if part["type"] != "NFC":
            raise refuse("normalizer", shown(part))
        flags |= Flag.NFC
    steps = parts(tokenizer, "pre_tokenizer")
    if steps[0]["type"] == "Digits":
        if not steps[0]["individual_digits"]:
            raise refuse("pre_tokenizer", shown(steps[0]))
        flags |= Flag.SPLIT_DIGITS
        steps = steps[1:]
    return flags | _split_flags(steps)


def _split_flags(steps: list[Part]) -> Flag:
    """Flags of a byte-level pre-tokenizer: [ByteLevel] with its own regex, or [Split, ByteLevel]."""
    last = steps[-1]
    if last["type"] != "ByteLevel":
        raise refuse("pre_tokenizer", f"{shown(last)} after ByteLevel")
    if last["add_prefix_space"]:
        raise refuse("pre_tokenizer", shown(last))
    if len(steps) == 1 and last["use_regex"]:
        return Flag.GPT2_REGEX
    if len(steps) == 2 and steps[0]["type"] == "Split" and not last["use_regex"]:
        return _regex_flags(steps[0])
    raise refuse("pre_tokenizer", " then ".join(shown(s) for s in steps))


def _regex_flags(split: Part) -> Flag:
    # The three patterns match every text without a gap, so keeping the matches only is the same as isolating them.
    keeps_matches = (split["behavior"], split["invert"]) in (("Isolated", False), ("Isolated", True), ("Removed", True))
    pattern = split["pattern"].get("Regex", "")
    for known, flags in _PATTERN_FLAGS.items():
        if keeps_matches and same_meaning(pattern, known):
            return flags
    raise refuse("pre_tokenizer", f"Split by {pattern or split['pattern']!r}, {split['behavior']}")


def _sentencepiece_flags(tokenizer: Tokenizer, model: Part) -> Flag:
    if not model["byte_fallback"]:
        raise refuse("model", "neither byte-level nor with byte_fallback")
    normalizer, splitter = parts(tokenizer, "normalizer"), parts(tokenizer, "pre_tokenizer")
    if not splitter and sorted(map(_space_rule, normalizer)) == ["prepend", "replace"]:
        return Flag(0)
    if not normalizer and len(splitter) == 1 and splitter[0]["type"] == "Metaspace":
        return _metaspace_flags(splitter[0])
    if not any(_space_rule(p) == "prepend" for p in normalizer) and not any(p["type"] == "Metaspace" for p in splitter):
        raise refuse("normalizer", f"puts no ▁ before the text ({' then '.join(map(shown, normalizer)) or 'none'})")
    if splitter:
        raise refuse("pre_tokenizer", " then ".join(map(shown, splitter)))
    raise refuse("normalizer", " then ".join(map(shown, normalizer)))


def _space_rule(part: Part) -> str:
    """What a normalizer does about spaces: "prepend" a ▁, "replace" spaces by ▁, or "other"."""
    if part == {"type": "Prepend", "prepend": SPACE_MARK}:
        return "prepend"
    pattern = part.get("pattern", {})
    if part["type"] == "Replace" and " " in pattern.values() and part["content"] == SPACE_MARK:
        return "replace"
    return "other"


def _metaspace_flags(part: Part) -> Flag:
    # Metaspace leaves the prefix out where the text starts with a space already. Flag 4 stands for just this rule;
    # without the flag the prefix is unconditional, as Llama 2's Prepend, so "always" has no place.
    if part["prepend_scheme"] == "first" and part["replacement"] == SPACE_MARK and not part["split"]:
        return Flag.PREFIX_FIRST_ONLY
    raise refuse("pre_tokenizer", shown(part))


def _added_bos(tokenizer: Tokenizer) -> int:
    """The id that the post-processor puts before the text, -1 for none."""
    bos = -1
    for part in parts(tokenizer, "post_processor"):
        if part["type"] == "ByteLevel":
            continue  # changes offsets only
        if part["type"] != "TemplateProcessing":
            raise refuse("post_processor", part["type"])
        ids = _template_ids(part)
        if ids and bos >= 0:
            raise refuse("post_processor", "adds more than one token")
        bos = ids[0] if ids else bos
    return bos


def _template_ids(part: Part) -> list[int]:
    """The ids that a TemplateProcessing puts before the text: none or one."""
    steps = [next(iter(step.items())) for step in part["single"]]
    names = [value["id"] for kind, value in steps if kind == "SpecialToken"]
    if not steps or steps[-1][0] != "Sequence" or len(steps) != len(names) + 1:
        raise refuse("post_processor", f"adds {', '.join(map(repr, names))} after the text")
    ids = [i for name in names for i in part["special_tokens"][name]["ids"]]
    if len(ids) > 1:
        raise refuse("post_processor", f"adds {len(ids)} tokens before the text")
    return ids
