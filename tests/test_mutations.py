"""Damaged files of every kind: a valid object or one of our errors, in bounded memory, nothing raw to a terminal."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from fuzz import Reader, run_reader, table

from tests.helpers.readers import readers

READERS = readers()
# torch's own reader and the tokenizer's proof take longer for each input.
FAST_INPUTS = {"torch .bin": 60, "tokenizer.json": 25, "mlt": 60}


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("reader", READERS, ids=lambda r: r.title)
def test_damaged_files(reader: Reader) -> None:
    outcome = run_reader(reader, FAST_INPUTS.get(reader.title, 300), None, seed=1, keep=None)
    assert outcome.good, table([outcome])
    assert outcome.n_refused > 0.3 * outcome.n_inputs


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda r: r.title)
def test_damaged_files_for_long(reader: Reader) -> None:
    outcome = run_reader(reader, None, 20.0, seed=2, keep=None)
    assert outcome.good, table([outcome])
