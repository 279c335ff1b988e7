"""Prompt and generation, written once over the engine contract."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from krafla_cli.errors import InputError
from krafla_cli.formats.text import counted
from krafla_cli.progress import SILENT, Progress
from krafla_cli.runtime.engine import Engine, Float32s
from krafla_cli.runtime.sampling import Sampler

# Positions of a prompt that are run together: enough for the matrix kernels, little enough for a bar that moves.
BATCH = 512

LogitsSink = Callable[[Float32s], object]
StopReason = Literal["stop", "length", "context", "interrupted"]


def prefill(
    engine: Engine,
    ids: Sequence[int],
    sink: LogitsSink | None = None,
    progress: Progress = SILENT,
    batch: int = BATCH,
) -> Float32s:
    """Runs a prompt in batches; returns the logits [vocab] of its last position.

    ``sink`` is given the logits [n, vocab] of every batch. Raises InputError: an empty prompt, or one that does not fit
    into what is left of the context.
    """
    if not len(ids):
        raise InputError("the prompt is empty: no tokens to run")
    n_left = engine.n_ctx - engine.position
    if len(ids) > n_left:
        most = engine.header.max_seq
        advice = f"shorten it, or raise --ctx (this model allows {most})" if engine.n_ctx < most else "shorten it"
        raise InputError(
            f"the prompt has {counted(len(ids), 'token')}, "
            f"the context has {counted(n_left, 'position')} of {engine.n_ctx} left; {advice}"
        )
    progress.start("prompt", len(ids), "tok")
    try:
        for start in range(0, len(ids), batch):
            part = ids[start : start + batch]
            is_last = start + batch >= len(ids)
            logits = engine.forward(part, "all" if sink else "last" if is_last else "none")
            if sink:
                sink(logits)
            progress.advance(len(part))
    finally:
        progress.finish()
    last: Float32s = logits[-1]
    return last


@dataclass
class Generation:
    """What a generation did: filled in while it runs. ``ids`` are the generated ones without the stop id.

    ``prompt_tokens`` were run, ``cached_tokens`` before them were in the cache already. Reason "stop": ``stop_id`` or
    ``stop_text`` says at what.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_id: int | None = None
    stop_text: str | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


def generate(
    engine: Engine,
    prompt_logits: Float32s,
    sampler: Sampler,
    report: Generation,
    max_tokens: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Yields the ids that follow what ``engine`` has run, whose last logits [vocab] are ``prompt_logits``.

    Ends at an id in ``stop_ids`` (not yielded), after ``max_tokens``, or when the context is full; ``report`` says
    which. Only generated ids end it: a stop id inside the prompt does not.
    """
    logits = prompt_logits
    seen = set(engine.ids.tolist())
    while max_tokens is None or len(report.ids) < max_tokens:
        started = time.perf_counter()
        if report.ids:
            logits = engine.forward(report.ids[-1:])[0]
        chosen = sampler.choose(logits, seen)
        report.decode_seconds += time.perf_counter() - started
        if chosen in stop_ids:
            report.stop_reason, report.stop_id = "stop", chosen
            return
        report.ids.append(chosen)
        seen.add(chosen)
        yield chosen
        if engine.position == engine.n_ctx:
            report.stop_reason = "context"
            return
    report.stop_reason = "length"


def logits_of(engine: Engine, ids: Sequence[int]) -> Float32s:
    """float32 logits [len(ids), vocab] of ``ids`` from an empty sequence on."""
    engine.reset()
    parts: list[Float32s] = []
    prefill(engine, ids, parts.append)
    return np.concatenate(parts)
