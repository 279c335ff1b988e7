"""The grammar's texts and their exact probabilities, against sums done by hand and by enumeration."""

import math
import random
from collections import Counter

import pytest
from grammar import Grammar
from story_grammar import STORY_GRAMMAR

PAIRS = Grammar(
    {"start": ["{first} and {second}"], "letters": ["a", "b", "c"]}, {"first": "letters", "second": "letters"}
)


def test_two_variables_never_become_the_same() -> None:
    assert PAIRS.log_probability("a and b", "start") == pytest.approx(math.log(1 / 6))
    assert PAIRS.log_probability("a and a", "start") == -math.inf


def test_a_variable_repeats_what_it_became() -> None:
    echo = Grammar({"start": ["{word} {word}"], "words": ["x", "y"]}, {"word": "words"})
    assert echo.log_probability("x x", "start") == pytest.approx(math.log(1 / 2))
    assert echo.log_probability("x y", "start") == -math.inf


def test_a_variable_can_be_drawn_from_a_rule_of_the_place() -> None:
    grammar = Grammar({"start": ["{word=low} {word}", "{word=high} {word}"], "low": ["a"], "high": ["A", "B"]}, {})
    # `{word}` alone names a rule unless the variable has a rule of its own.
    with pytest.raises(KeyError):
        grammar.generate(random.Random(0), "start")
    named = Grammar(grammar.rules, {"word": "low"})
    assert named.log_probability("B B", "start") == pytest.approx(math.log(1 / 4))
    assert named.log_probability("a a", "start") == pytest.approx(math.log(1 / 2))


def test_all_derivations_of_an_ambiguous_text_count() -> None:
    ambiguous = Grammar({"start": ["{x}{x}"], "x": ["a", "aa"]}, {})
    assert ambiguous.log_probability("aaa", "start") == pytest.approx(math.log(1 / 2))
    assert ambiguous.log_probability("aa", "start") == pytest.approx(math.log(1 / 4))
    assert ambiguous.log_probability("a", "start") == -math.inf


def test_an_alternative_listed_twice_is_twice_as_likely() -> None:
    assert Grammar({"start": ["a", "a", "b"]}, {}).log_probability("a", "start") == pytest.approx(math.log(2 / 3))


def test_generated_texts_occur_as_often_as_their_probability_says() -> None:
    rng = random.Random(0)
    counts = Counter(PAIRS.generate(rng, "start") for _ in range(3000))
    assert len(counts) == 6
    assert all(abs(count / 3000 - 1 / 6) < 0.03 for count in counts.values())


def test_every_generated_story_is_explained() -> None:
    for seed in range(60):
        text = STORY_GRAMMAR.generate(random.Random(seed), "conversation")
        assert -80 < STORY_GRAMMAR.log_probability(text, "conversation") < -10
        assert STORY_GRAMMAR.log_probability(text.replace("the", "teh", 1), "conversation") == -math.inf
