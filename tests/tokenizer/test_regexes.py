"""Pre-tokenizer patterns recognised by meaning: spellings that are equal, and near misses that are not."""

from __future__ import annotations

import pytest
import regex

from krafla_cli.tokenizer.build import GPT2_PATTERN, LLAMA3_PATTERN, SINGLE_DIGIT_PATTERN
from krafla_cli.tokenizer.corpus import SENTENCES
from krafla_cli.tokenizer.regexes import NotUnderstoodError, canonical, same_meaning
from tests.tokenizer import toys

EQUAL = [
    (LLAMA3_PATTERN.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)"), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace(r"]?\p{L}+", r"]?+\p{L}++"), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace(r"\s*[\r\n]+", r"\s*[\r\n]"), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace(r"[^\r\n\p{L}\p{N}]", r"[^\p{N}\n\p{Letter}\r]"), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace("| ?[", r"|\x20?["), LLAMA3_PATTERN),
    (LLAMA3_PATTERN[: -len(r"|\s+")] + r"|\s", LLAMA3_PATTERN),
    (f"(?:{LLAMA3_PATTERN})", LLAMA3_PATTERN),
    (SINGLE_DIGIT_PATTERN.replace(r"|\p{N}|", r"|\p{Number}{1}|"), SINGLE_DIGIT_PATTERN),
    (SINGLE_DIGIT_PATTERN.replace(r"|\p{N}|", r"|(?:\p{N})|"), SINGLE_DIGIT_PATTERN),
    (GPT2_PATTERN.replace("'s|'t|'re|'ve|'m|'ll|'d", "'d|'ll|'m|'re|'s|'t|'ve"), GPT2_PATTERN),
    (GPT2_PATTERN.replace("'s|'t|'re|'ve|'m|'ll|'d", "(?:'[dmst]|'(?:ll|ve|re))"), GPT2_PATTERN),
    (GPT2_PATTERN.replace(r"\p{L}+", r"\p{L}{1,}"), GPT2_PATTERN),
]
DIFFERENT = [
    (toys.QWEN35, SINGLE_DIGIT_PATTERN),
    (SINGLE_DIGIT_PATTERN, LLAMA3_PATTERN),
    (GPT2_PATTERN, LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace("(?i:", "(?:"), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace("{1,3}", "{1,2}"), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\d{1,3}"), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace(r"(?!\S)", r"(?=\S)"), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace("'ll", "'l"), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace(r"|\s*[\r\n]+", ""), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace(r"[\r\n]*", r"[\r\n/]*"), LLAMA3_PATTERN),
    (LLAMA3_PATTERN.replace(r"\s*[\r\n]+", r"\s*+[\r\n]+"), LLAMA3_PATTERN),  # possessive: takes the newline itself
    (GPT2_PATTERN.replace(r"\p{L}+", r"\p{L}+?"), GPT2_PATTERN),
    (GPT2_PATTERN.replace("'s|'t", "'s|'st|'t"), GPT2_PATTERN),
    (GPT2_PATTERN + "|x", GPT2_PATTERN),
    ("(" * 5000, GPT2_PATTERN),
    ("", GPT2_PATTERN),
]


@pytest.mark.parametrize(("pattern", "known"), EQUAL)
def test_spellings_of_one_rule(pattern: str, known: str) -> None:
    assert pattern != known
    assert same_meaning(pattern, known)


@pytest.mark.parametrize(("pattern", "known"), EQUAL)
def test_equal_spellings_split_text_alike(pattern: str, known: str) -> None:
    """The rewritings are true: another regex engine finds the same words with both."""
    for text in (*SENTENCES, "a'LLb  \n \r\n  c 'ſ", "x\n \n", "  ", "12345 ٣٤٥٦", "'S'D't"):
        assert regex.findall(pattern, text) == regex.findall(known, text)


@pytest.mark.parametrize(("pattern", "known"), DIFFERENT)
def test_near_misses(pattern: str, known: str) -> None:
    assert not same_meaning(pattern, known)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a",
        "a)",
        "[a",
        "a{1",
        "a{x}",
        "a**",
        "(?<=a)b",
        "(?i)a",
        "[a-z]",
        "[[a]b]",
        "\\k",
        "\\",
        "a.b",
        "^a",
        "a$",
        "*",
        "\\p",
        "\\pL",
        "[^\\S]",
        "a+?",
        "(?i:[^a])",
        "(?i:\\p{L})",
        "[a&&b]",
        "a" * 2001,
        "ab|a|c{2}++d",
    ],
)
def test_what_is_not_understood_is_never_equal_to_anything(pattern: str) -> None:
    with pytest.raises((NotUnderstoodError, RecursionError)):
        canonical(pattern)
    assert not same_meaning(pattern, GPT2_PATTERN)
