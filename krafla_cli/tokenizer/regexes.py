r"""Recognising a pre-tokenizer's regular expression by its meaning.

The same splitting rule is written in many ways (`[^\s\p{N}\p{L}]`, `++`, `'(?i:[sdmt]|ll|ve|re)`). A pattern is parsed
and brought to a canonical form in which the known spellings of one rule are equal; a pattern that is not understood has
no canonical form and is never taken for a known one. Every rewriting below keeps the matches the same:

- character classes are sets, so order and repetition do not matter;
- a finite alternation of strings none of which is a prefix of another is a set, so its order does not matter;
- a possessive quantifier is an ordinary one when backtracking into it could not help;
- `X*Y+` at the end of a branch, with Y inside X, ends where `X*Y` ends;
- `\s+(?!\S)|\s` at the end: when the first branch fails only a single blank is left, so `\s` and `\s+` agree.
"""

from __future__ import annotations

import itertools
import string
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

_MAX_PATTERN = 2000
_MAX_WORDS = 64


class NotUnderstoodError(ValueError):
    """The pattern has a construct that this module does not model."""


class CharSet(NamedTuple):
    """One character out of (or, negated, outside) ``items``: single characters and classes such as "\\p{L}"."""

    negated: bool
    items: frozenset[str]


class Words(NamedTuple):
    """One of ``words``, a prefix-free set."""

    ignore_case: bool
    words: frozenset[str]


class LookAhead(NamedTuple):
    """A zero-width look-ahead for ``then``."""

    negated: bool
    then: tuple[tuple[Item, ...], ...]


@dataclass(frozen=True)
class Item:
    """An atom with its quantifier; ``most`` is None without a limit, ``mode`` "" (greedy), "+" or "?"."""

    atom: CharSet | Words | LookAhead | tuple[tuple[Item, ...], ...]
    least: int = 1
    most: int | None = 1
    mode: str = ""


Branch = tuple[Item, ...]
_BLANK = CharSet(False, frozenset({"\\s"}))
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_PROPERTIES = {"Letter": "L", "Number": "N", "Mark": "M", "Alphabetic": "Alphabetic"}


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0

    def peek(self, token: str) -> bool:
        return self.text.startswith(token, self.at)

    def accept(self, token: str) -> bool:
        if self.peek(token):
            self.at += len(token)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.text):
            raise NotUnderstoodError("the pattern ends early")
        self.at += 1
        return self.text[self.at - 1]

    def alternation(self, ignore_case: bool) -> tuple[Branch, ...]:
        branches = [self.branch(ignore_case)]
        while self.accept("|"):
            branches.append(self.branch(ignore_case))
        return tuple(branches)

    def branch(self, ignore_case: bool) -> Branch:
        items: list[Item] = []
        while self.at < len(self.text) and not self.peek("|") and not self.peek(")"):
            items.append(self.quantified(self.atom(ignore_case)))
        return tuple(items)

    def atom(self, ignore_case: bool) -> Item:
        char = self.next()
        if char == "(":
            return Item(self.group(ignore_case))
        if char == "[":
            atom = self.char_class()
        elif char == "\\":
            atom = self.escape()
        elif char in ".^$*+?{":
            raise NotUnderstoodError(f"{char!r} at {self.at - 1}")
        else:
            atom = CharSet(False, frozenset({char}))
        return Item(_as_words(atom, True) if ignore_case else atom)

    def group(self, ignore_case: bool) -> LookAhead | tuple[Branch, ...]:
        for token in ("?:", "?i:", "?!", "?="):
            if self.accept(token):
                break
        else:
            if self.peek("?"):
                raise NotUnderstoodError(f"group at {self.at}")
            token = "?:"
        branches = self.alternation(ignore_case or token == "?i:")
        if not self.accept(")"):
            raise NotUnderstoodError("a group is not closed")
        return LookAhead(token == "?!", branches) if token in ("?!", "?=") else branches

    def char_class(self) -> CharSet:
        negated = self.accept("^")
        items: set[str] = set()
        while not self.accept("]"):
            if self.peek("[") or self.peek("&&"):
                raise NotUnderstoodError(f"nested class at {self.at}")
            part = self.escape() if self.accept("\\") else CharSet(False, frozenset({self.next()}))
            if part.negated:
                raise NotUnderstoodError("a negated class inside a class")
            if self.peek("-") and not self.text.startswith("-]", self.at):
                raise NotUnderstoodError("a range")
            items |= part.items
        return CharSet(negated, frozenset(items))

    def escape(self) -> CharSet:
        char = self.next()
        if char in "sSdDwW":
            return CharSet(char.isupper(), frozenset({f"\\{char.lower()}"}))
        if char in "pP":
            end = self.text.find("}", self.at)
            if not self.accept("{") or end < 0:
                raise NotUnderstoodError("a property without a name")
            name, self.at = self.text[self.at : end], end + 1
            negated = char == "P"
            if name.startswith("^"):
                name, negated = name[1:], not negated
            return CharSet(negated, frozenset({f"\\p{{{_PROPERTIES.get(name, name)}}}"}))
        if char in _ESCAPES:
            return CharSet(False, frozenset({_ESCAPES[char]}))
        if char == "x" and set(self.text[self.at : self.at + 2]) <= set(string.hexdigits):
            code, self.at = self.text[self.at : self.at + 2], self.at + 2
            return CharSet(False, frozenset({chr(int(code, 16))}))
        if char in string.ascii_letters + string.digits:
            raise NotUnderstoodError(f"\\{char}")
        return CharSet(False, frozenset({char}))

    def quantified(self, item: Item) -> Item:
        if self.peek("{"):
            end = self.text.find("}", self.at)
            low, comma, high = self.text[self.at + 1 : max(end, 0)].partition(",")
            if end < 0 or not low.isdecimal() or (high and not high.isdecimal()):
                raise NotUnderstoodError("a malformed repetition")
            self.at = end + 1
            item = replace(item, least=int(low), most=(int(high) if high else None) if comma else int(low))
        else:
            limits = {"?": (0, 1), "*": (0, None), "+": (1, None)}
            least, most = next((v for k, v in limits.items() if self.accept(k)), (1, 1))
            if (least, most) == (1, 1):
                return item
            mode = next((m for m in ("+", "?") if self.accept(m)), "")
            item = replace(item, least=least, most=most, mode=mode)
        if self.peek("?") or self.peek("+") or self.peek("*") or self.peek("{"):
            raise NotUnderstoodError("a repeated repetition")
        return item


def _as_words(atom: CharSet, ignore_case: bool) -> Words:
    """A positive class of plain characters as words of length one."""
    if atom.negated or any(len(c) > 1 for c in atom.items):
        raise NotUnderstoodError("a class that ignores case")
    return Words(ignore_case, frozenset(atom.items))


def _finite(branch: Branch) -> Words | None:
    """The branch as a finite set of strings, or None."""
    parts: list[Words] = []
    for item in branch:
        atom = item.atom
        if (item.least, item.most) != (1, 1):
            return None
        if isinstance(atom, CharSet):
            if atom.negated or any(len(c) > 1 for c in atom.items):
                return None
            parts.append(Words(False, frozenset(atom.items)))
        elif isinstance(atom, Words):
            parts.append(atom)
        elif isinstance(atom, LookAhead):
            return None
        else:
            inner = [_finite(b) for b in atom]
            merged = _union([w for w in inner if w is not None]) if None not in inner else None
            if merged is None:
                return None
            parts.append(merged)
    return _product(parts)


def _caseless(words: frozenset[str]) -> bool:
    return all(w.lower() == w.upper() for w in words)


def _same_case_rule(parts: list[Words]) -> bool | None:
    """The one ignore_case that all parts can be read with, or None."""
    rules = {p.ignore_case for p in parts if not _caseless(p.words)}
    return rules.pop() if len(rules) == 1 else (False if not rules else None)


def _product(parts: list[Words]) -> Words | None:
    rule = _same_case_rule(parts)
    n_words = 1
    for part in parts:
        n_words *= len(part.words)
    if rule is None or not parts or n_words > _MAX_WORDS:
        return None
    return Words(rule, frozenset("".join(p) for p in itertools.product(*(part.words for part in parts))))


def _union(parts: list[Words]) -> Words | None:
    """One set for the alternation of ``parts``; None when a word is a prefix of another, as order then matters."""
    rule = _same_case_rule(parts)
    words = frozenset().union(*(p.words for p in parts))
    if rule is None or any(a != b and b.startswith(a) for a in words for b in words):
        return None
    return Words(rule, words)


def _disjoint(a: CharSet, b: CharSet) -> bool:
    """Whether no character is in both; false when that cannot be told from the items alone."""
    if a.negated == b.negated:
        return False
    outside, inside = (a, b) if a.negated else (b, a)
    return _contains(outside.items, inside.items)


def _contains(outer: frozenset[str], inner: frozenset[str]) -> bool:
    return all(i in outer or ("\\s" in outer and i in "\t\n\v\f\r ") for i in inner)


def _without_possessive(branch: Branch) -> Branch:
    """Possessive quantifiers made plain where that changes nothing; others are not understood."""
    out: list[Item] = []
    for i, item in enumerate(branch):
        following = branch[i + 1] if i + 1 < len(branch) else None
        if item.mode == "?":
            raise NotUnderstoodError("a lazy repetition")
        if item.mode == "+" and following is not None and following.least > 0:
            a, b = item.atom, following.atom
            if not (isinstance(a, CharSet) and isinstance(b, CharSet) and _disjoint(a, b)):
                raise NotUnderstoodError("a possessive repetition")
        out.append(replace(item, mode=""))
    return tuple(out)


def _short_tail(branch: Branch) -> Branch:
    """X*Y+ at the end as X*Y, where Y is inside X."""
    if len(branch) < 2:
        return branch
    x, y = branch[-2], branch[-1]
    star, plus = (x.least, x.most) == (0, None), (y.least, y.most) == (1, None)
    if star and plus and isinstance(x.atom, CharSet) and isinstance(y.atom, CharSet):
        both_plain = not x.atom.negated and not y.atom.negated
        if both_plain and _contains(x.atom.items, y.atom.items):
            return (*branch[:-1], replace(y, most=1))
    return branch


def _is_group(atom: CharSet | Words | LookAhead | tuple[Branch, ...]) -> TypeGuard[tuple[Branch, ...]]:
    return type(atom) is tuple


def _opened(branches: tuple[Branch, ...]) -> list[Branch]:
    """The branches, with a branch that is nothing but a group replaced by the group's own branches."""
    out: list[Branch] = []
    for branch in branches:
        first = branch[0] if len(branch) == 1 else None
        if first is not None and (first.least, first.most) == (1, 1) and _is_group(first.atom):
            out += _opened(first.atom)
        else:
            out.append(branch)
    return out


def _unwrapped(branch: Branch) -> Branch:
    """Groups of a single branch that are not repeated, opened."""
    out: list[Item] = []
    for item in branch:
        atom = item.atom
        if _is_group(atom) and len(atom) == 1:
            if (item.least, item.most) == (1, 1):
                out += _unwrapped(atom[0])
                continue
            if len(atom[0]) == 1 and (atom[0][0].least, atom[0][0].most) == (1, 1):
                out.append(replace(item, atom=atom[0][0].atom))
                continue
        out.append(item)
    return tuple(out)


def _canonical_branch(branch: Branch) -> Branch:
    finite = _finite(branch)
    if finite is not None:
        return (Item(finite),)
    return _short_tail(_without_possessive(_unwrapped(branch)))


def _merge_words(branches: list[Branch]) -> list[Branch]:
    """Neighbouring branches that are plain sets of words, joined."""
    out: list[Branch] = []
    for branch in branches:
        atom = branch[0].atom if len(branch) == 1 else None
        last = out[-1][0].atom if out and len(out[-1]) == 1 else None
        if isinstance(atom, Words) and isinstance(last, Words):
            merged = _union([last, atom])
            if merged is not None:
                out[-1] = (Item(merged),)
                continue
        out.append(branch)
    return out


def _blank_tail(branches: list[Branch]) -> list[Branch]:
    not_before_black = LookAhead(True, ((Item(CharSet(True, frozenset({"\\s"}))),),))
    run = Item(_BLANK, 1, None)
    if branches[-2:] == [(run, Item(not_before_black)), (Item(_BLANK),)]:
        return [*branches[:-1], (run,)]
    return branches


def canonical(pattern: str) -> tuple[Branch, ...]:
    """The canonical form of ``pattern``. Raises NotUnderstoodError."""
    if len(pattern) > _MAX_PATTERN:
        raise NotUnderstoodError("the pattern is too long")
    parser = _Parser(pattern)
    branches = parser.alternation(ignore_case=False)
    if parser.at != len(pattern):
        raise NotUnderstoodError(f"')' at {parser.at}")
    return tuple(_blank_tail(_merge_words([_canonical_branch(b) for b in _opened(branches)])))


def same_meaning(pattern: str, known: str) -> bool:
    """Whether ``pattern`` is a spelling of ``known``; false when it is not understood."""
    if pattern == known:
        return True
    try:
        return canonical(pattern) == canonical(known)
    except (NotUnderstoodError, RecursionError):
        return False
