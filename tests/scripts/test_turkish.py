"""Turkish noun forms, against forms written by hand."""

import pytest
from turkish import capitalize, noun_form


@pytest.mark.parametrize(
    ("stem", "owner", "case", "form"),
    [
        ("araba", "", "accusative", "arabayı"),
        ("araba", "my", "accusative", "arabamı"),
        ("araba", "our", "dative", "arabamıza"),
        ("kedi", "", "genitive", "kedinin"),
        ("ütü", "your", "nominative", "ütün"),
        ("radyo", "", "dative", "radyoya"),
        ("kitap(b)", "", "nominative", "kitap"),
        ("kitap(b)", "", "dative", "kitaba"),
        ("kitap(b)", "my", "nominative", "kitabım"),
        ("kitap(b)", "your", "accusative", "kitabını"),
        ("ağaç(c)", "our", "genitive", "ağacımızın"),
        ("köpek(ğ)", "", "accusative", "köpeği"),
        ("top", "", "accusative", "topu"),
        ("göl", "my", "dative", "gölüme"),
    ],
)
def test_noun_form(stem: str, owner: str, case: str, form: str) -> None:
    assert noun_form(stem, owner, case) == form


@pytest.mark.parametrize(("sentence", "capitalized"), [("iki", "İki"), ("ısı", "Isı"), ("çay", "Çay"), ("Ali", "Ali")])
def test_capitalize(sentence: str, capitalized: str) -> None:
    assert capitalize(sentence) == capitalized
