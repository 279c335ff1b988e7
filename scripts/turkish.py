"""Turkish noun forms: possessive and case suffixes with vowel harmony and the softening of a final consonant.

A stem is written as in a dictionary, with the soft final consonant in parentheses where it has one: "kitap(b)" is
kitap, but kitabı and kitabım. Stems that drop a vowel (resim, resmi) or break the harmony (saat, saati) do not fit.
"""

from __future__ import annotations

VOWELS = "aıoueiöü"
_HIGH_VOWEL = {"a": "ı", "ı": "ı", "o": "u", "u": "u", "e": "i", "i": "i", "ö": "ü", "ü": "ü"}
_POSSESSIVE_ENDING = {"": "", "my": "m", "your": "n", "our": "m{high}z"}
_CASE_SUFFIXES = {  # case -> suffix after a consonant, suffix after a vowel
    "nominative": ("", ""),
    "accusative": ("{high}", "y{high}"),
    "genitive": ("{high}n", "n{high}n"),
    "dative": ("{low}", "y{low}"),
}


def noun_form(stem: str, owner: str = "", case: str = "nominative") -> str:
    """The form of a noun for an owner ("", "my", "your", "our") in a case: arabamı is "araba", "my", "accusative"."""
    word, soft = _parse_stem(stem)
    if owner:
        ending = _POSSESSIVE_ENDING[owner]
        word = soft = _with_suffix(word, ending) if _ends_in_vowel(word) else _with_suffix(soft, "{high}" + ending)
    after_consonant, after_vowel = _CASE_SUFFIXES[case]
    if _ends_in_vowel(word):
        return _with_suffix(word, after_vowel)
    return _with_suffix(soft, after_consonant) if after_consonant else word


def capitalize(sentence: str) -> str:
    """The sentence with a Turkish capital letter: i becomes İ, ı becomes I."""
    return {"i": "İ", "ı": "I"}.get(sentence[0], sentence[0].upper()) + sentence[1:]


def _parse_stem(stem: str) -> tuple[str, str]:
    """The word, and what suffixes that begin with a vowel are added to."""
    word, _, soft_consonant = stem.rstrip(")").partition("(")
    return word, word[:-1] + soft_consonant if soft_consonant else word


def _ends_in_vowel(word: str) -> bool:
    return word[-1] in VOWELS


def _with_suffix(word: str, suffix: str) -> str:
    """Adds a suffix whose vowels follow the last one of the word."""
    last_vowel = next(letter for letter in reversed(word) if letter in VOWELS)
    return word + suffix.format(high=_HIGH_VOWEL[last_vowel], low="a" if last_vowel in "aıou" else "e")
