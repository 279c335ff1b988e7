"""The generated tables of the README are those of the code."""

import docs


def test_the_readme_is_current() -> None:
    text = docs.README.read_text()
    assert docs.with_tables(text) == text
