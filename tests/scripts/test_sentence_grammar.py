"""Meanings and the sentences that express them."""

import random
from dataclasses import fields

from sentence_grammar import LANGUAGES, SLOTS, near_miss, paraphrase, random_meaning


def test_a_near_miss_differs_in_one_slot() -> None:
    rng = random.Random(0)
    for _ in range(200):
        meaning = random_meaning(rng)
        other = near_miss(meaning, rng)
        assert sum(getattr(meaning, f.name) != getattr(other, f.name) for f in fields(meaning)) == 1


def test_sentences_are_tidy() -> None:
    rng = random.Random(0)
    for _ in range(300):
        meaning = random_meaning(rng)
        for language in LANGUAGES:
            sentence = paraphrase(meaning, language, rng)
            assert sentence[0].isupper()
            assert sentence[-1] in ".?!"
            assert "  " not in sentence
            assert not any(mark in sentence for mark in "{}/()")


def test_no_two_concepts_of_a_slot_share_a_word() -> None:
    for slot, options in SLOTS.items():
        if slot in ("frame", "owner"):
            continue
        for language in LANGUAGES:
            words = [word for concept in options for word in getattr(concept, language)]
            assert len(words) == len(set(words)), (slot, language)
