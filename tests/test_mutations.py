"""Damaged files of every kind: a valid object or one of our errors, in bounded memory, nothing raw to a terminal."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from fuzz import Outcome, Reader, run_reader, table, try_input

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families import family_of
from krafla_cli.errors import MlbError
from tests.helpers.checkpoints import CHECKPOINTS
from tests.helpers.json_variants import variants
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


def json_files(reader: Reader) -> Iterator[bytes]:
    """The reader's first valid file with each JSON value of another kind."""
    data = reader.seeds[0]
    if reader.title == "safetensors":
        (n_header,) = struct.unpack_from("<Q", data)
        for document in variants(json.loads(data[8 : 8 + n_header])):
            header = json.dumps(document).encode()
            yield struct.pack("<Q", len(header)) + header + data[8 + n_header :]
    else:
        first, *lines = data.splitlines() if reader.title == "registry" else [data]
        for document in variants(json.loads(first)):
            yield b"\n".join((json.dumps(document).encode(), *lines))


@pytest.mark.parametrize("reader", [r for r in READERS if r.is_text or r.title == "safetensors"], ids=lambda r: r.title)
def test_json_values_of_every_kind(reader: Reader, tmp_path: Path) -> None:
    outcome = Outcome(reader.title)
    # The proof of a tokenizer takes long: some of its many values.
    for data in islice(json_files(reader), None, None, 97 if reader.title == "tokenizer.json" else 1):
        (tmp_path / reader.name).write_bytes(data)
        try_input(reader, tmp_path / reader.name, len(data), outcome)
    assert outcome.good, table([outcome])
    assert outcome.n_inputs > 20


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_config_values_of_every_kind(name: str) -> None:
    for raw in variants(CHECKPOINTS[name].make_config().to_dict()):
        if not isinstance(raw, dict):
            continue
        try:
            config = ModelConfig(raw, "config.json")
            family = family_of(config)
            family.header(config.with_defaults(family.defaults))
        except MlbError as error:
            assert "\n" not in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda r: r.title)
def test_damaged_files_for_long(reader: Reader) -> None:
    outcome = run_reader(reader, None, 20.0, seed=2, keep=None)
    assert outcome.good, table([outcome])
