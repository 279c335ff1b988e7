"""Prompt and generation over the contract, with an engine that computes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from krafla_cli.errors import InputError
from krafla_cli.formats.mlb import LAYER_LINEAR
from krafla_cli.runtime.engine import Engine, Float32s, Ids, LogitsWanted
from krafla_cli.runtime.generation import Generation, generate, logits_of, prefill
from krafla_cli.runtime.sampling import Sampler, SamplingOptions
from tests.helpers.models import HEADERS, TINY


class Counter(Engine):
    """Says that the id after i is i + 1; its recurrent state is the sum of the ids."""

    name = "counter"

    def __init__(self, n_ctx: int = 50, hybrid: bool = False) -> None:
        super().__init__(HEADERS["hybrid"] if hybrid else TINY, n_ctx)
        self.calls: list[tuple[int, LogitsWanted]] = []
        self.total = 0

    def _forward(self, ids: Ids, logits: LogitsWanted) -> Float32s:
        self.calls.append((len(ids), logits))
        self.total += int(ids.sum())
        wanted = {"none": ids[:0], "last": ids[-1:], "all": ids}[logits]
        return np.eye(self.header.vocab, dtype=np.float32)[(wanted + 1) % self.header.vocab]

    def _copy_state(self) -> Any:
        return self.total

    def _set_state(self, state: Any) -> None:
        self.total = state

    def _clear_state(self) -> None:
        self.total = 0


def _run(engine: Engine, prompt: list[int], **options: Any) -> tuple[list[int], Generation]:
    report = Generation()
    logits = prefill(engine, prompt)
    return list(generate(engine, logits, Sampler(SamplingOptions()), report, **options)), report


def test_generates_until_a_stop_id() -> None:
    ids, report = _run(Counter(), [7, 8, 9], stop_ids=frozenset({13}))
    assert ids == report.ids == [10, 11, 12]
    assert (report.stop_reason, report.stop_id) == ("stop", 13)


def test_a_stop_id_in_the_prompt_does_not_end_it() -> None:
    assert _run(Counter(), [13, 9], stop_ids=frozenset({13}))[0] == [10, 11, 12]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_max_tokens(n: int) -> None:
    engine = Counter()
    ids, report = _run(engine, [1], max_tokens=n)
    assert ids == list(range(2, 2 + n))
    assert report.stop_reason == "length"
    # The last generated id need not be run.
    assert engine.position == 1 + max(n - 1, 0)


def test_the_context_fills_up() -> None:
    ids, report = _run(Counter(n_ctx=6), [1, 2, 3, 4])
    assert ids == [5, 6, 7]
    assert report.stop_reason == "context"
    assert _run(Counter(n_ctx=4), [1, 2, 3, 4])[0] == [5]


def test_the_prompt_runs_in_batches_and_only_the_end_has_logits() -> None:
    engine = Counter()
    assert prefill(engine, [1, 2, 3, 4, 5], batch=2).argmax() == 6
    assert engine.calls == [(2, "none"), (2, "none"), (1, "last")]


def test_logits_of_every_position() -> None:
    engine = Counter()
    engine.forward([44])
    assert logits_of(engine, [5, 3, 9]).argmax(1).tolist() == [6, 4, 10]


def test_prompts_that_cannot_run() -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        prefill(Counter(), [])
    with pytest.raises(InputError, match=r"the prompt has 7 tokens, the context has 6 positions of 6 left.*--ctx"):
        prefill(Counter(n_ctx=6), [1] * 7)
    with pytest.raises(InputError, match="token id 101 is outside the vocabulary of 101"):
        prefill(Counter(), [101])
    with pytest.raises(InputError, match="token id -1 is outside"):
        prefill(Counter(), [-1])


def test_a_refused_call_leaves_the_sequence_as_it_was() -> None:
    engine = Counter(n_ctx=4)
    engine.forward([1, 2, 3])
    with pytest.raises(InputError, match="2 ids do not fit: 1 of 4"):
        engine.forward([4, 5])
    assert engine.position == 3
    assert engine.forward([4]).argmax() == 5


@pytest.mark.parametrize("n_ctx", [0, 257])
def test_the_context_is_limited_by_the_model(n_ctx: int) -> None:
    with pytest.raises(InputError, match=f"a context of {n_ctx} positions: the model allows 1 to 256"):
        Counter(n_ctx=n_ctx)


def test_truncate() -> None:
    engine = Counter()
    engine.forward([1, 2, 3])
    engine.truncate(2)
    assert engine.ids.tolist() == [1, 2]
    with pytest.raises(InputError, match="cannot keep 3 positions of a sequence of 2"):
        engine.truncate(3)


def test_a_recurrent_model_goes_back_only_to_a_snapshot() -> None:
    engine = Counter(hybrid=True)
    assert engine.header.flags_of(0) == LAYER_LINEAR
    engine.forward([1, 2])
    snapshot = engine.snapshot()
    engine.forward([3, 4])
    with pytest.raises(InputError, match="linear-attention"):
        engine.truncate(2)
    engine.restore(snapshot)
    assert (engine.total, engine.ids.tolist()) == (3, [1, 2])
    engine.truncate(0)
    assert (engine.total, engine.position) == (0, 0)


def test_a_snapshot_ends_when_its_positions_are_written_over() -> None:
    engine = Counter()
    engine.forward([1, 2])
    short = engine.snapshot()
    engine.forward([3, 4])
    full = engine.snapshot()
    engine.restore(short)
    engine.restore(full)  # forth again: nothing was written over
    engine.restore(short)
    engine.forward([9])
    with pytest.raises(InputError, match="the snapshot of 4 positions is no longer in the cache"):
        engine.restore(full)
    engine.restore(short)
    assert engine.ids.tolist() == [1, 2]
