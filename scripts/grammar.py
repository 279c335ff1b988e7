"""A small generative grammar with memory: it writes random texts and gives the exact probability of any text.

A grammar maps a rule to its alternatives, all equally likely (list one twice to double its chance). An alternative is
text with slots in braces:

    {rule}            expands a rule
    {variable}        expands the variable's rule once per text; after that, repeats what it became
    {variable=rule}   the same, from the rule named here

Two variables of one text never become the same ("a fox and a bear").
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_SLOT = re.compile(r"\{([^{}]+)\}")


class Slot(NamedTuple):
    """A place in a template that a rule fills; with a variable, once per text."""

    variable: str | None
    rule: str


class State(NamedTuple):
    """A partial derivation that explains a text up to `position`, with what it remembers: (variable, text) pairs."""

    position: int
    memory: tuple[tuple[str, str], ...]


Weighted = dict[State, float]
"""Partial derivations and the probability of each."""


class Grammar:
    """Rules, and the two things one can do with them: `generate` a text, and get the `log_probability` of a text."""

    def __init__(self, rules: Mapping[str, Sequence[str]], variables: Mapping[str, str]) -> None:
        """`rules`: rule -> alternatives; `variables`: variable -> the rule that it is drawn from."""
        self.rules = rules
        self.variables = variables

    def generate(self, rng: random.Random, start: str) -> str:
        """One random text derived from the rule `start`."""
        return self._write(f"{{{start}}}", {}, rng)

    def log_probability(self, text: str, start: str) -> float:
        """Natural logarithm of the probability that `start` yields `text`, summed over all of its derivations.

        It is -inf for a text that the grammar cannot produce.
        """
        ends = self._match(f"{{{start}}}", text, State(0, ()))
        total = sum(probability for state, probability in ends.items() if state.position == len(text))
        return math.log(total) if total else -math.inf

    def _slot(self, source: str) -> Slot:
        """The slot written as `source` between braces."""
        if source in self.variables:
            return Slot(source, self.variables[source])
        variable, _, rule = source.rpartition("=")
        return Slot(variable or None, rule)

    def _choices(self, slot: Slot, memory: Mapping[str, str]) -> list[str]:
        """Alternatives of a slot's rule; for a variable, without what another variable has become."""
        taken = set(memory.values()) if slot.variable else set()
        return [alternative for alternative in self.rules[slot.rule] if alternative not in taken]

    def _write(self, template: str, memory: dict[str, str], rng: random.Random) -> str:
        """Expands a template, adding to `memory`."""

        def fill(found: re.Match[str]) -> str:
            slot = self._slot(found[1])
            if slot.variable in memory:
                return memory[slot.variable]
            text = self._write(rng.choice(self._choices(slot, memory)), memory, rng)
            if slot.variable:
                memory[slot.variable] = text
            return text

        return _SLOT.sub(fill, template)

    def _match(self, template: str, text: str, start: State) -> Weighted:
        """All ways in which a template continues `text` from the state `start`."""
        states: Weighted = {start: 1.0}
        for index, part in enumerate(_SLOT.split(template)):
            after: Weighted = {}
            for state, probability in states.items():
                is_slot = index % 2 == 1
                ends = self._match_slot(self._slot(part), text, state) if is_slot else _match_literal(part, text, state)
                _add(after, ends, probability)
            states = after
        return states

    def _match_slot(self, slot: Slot, text: str, start: State) -> Weighted:
        """All ways in which one slot continues `text` from the state `start`."""
        memory = dict(start.memory)
        if slot.variable in memory:
            return _match_literal(memory[slot.variable], text, start)
        choices = self._choices(slot, memory)
        ends: Weighted = {}
        for alternative in choices:
            _add(ends, self._match(alternative, text, start), 1 / len(choices))
        if slot.variable is None:
            return ends
        return {_remember(end, slot.variable, text[start.position : end.position]): p for end, p in ends.items()}


def _match_literal(literal: str, text: str, start: State) -> Weighted:
    if not text.startswith(literal, start.position):
        return {}
    return {State(start.position + len(literal), start.memory): 1.0}


def _remember(state: State, variable: str, text: str) -> State:
    return State(state.position, tuple(sorted({**dict(state.memory), variable: text}.items())))


def _add(total: Weighted, more: Weighted, factor: float) -> None:
    for state, probability in more.items():
        total[state] = total.get(state, 0.0) + factor * probability
