"""Perplexity, and divergence from a baseline, over the windows of a text; streamed, in float64 sums."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import DataError, InputError
from krafla_cli.pool import LocalPool, Pool
from krafla_cli.progress import SILENT, Progress
from krafla_cli.runtime.engine import Engine, Float32s, Ids

_MAX_LOGITS = 1 << 24  # logits in memory at once (64 MB a model)

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """Ids that run as one sequence; those after position ``first`` are predicted and scored."""

    ids: Ids
    first: int

    @property
    def n_scored(self) -> int:
        return len(self.ids) - 1 - self.first


def sliding_windows(ids: Sequence[int], n_positions: int, stride: int) -> list[Window]:
    """The windows of transformers' perplexity guide: ``n_positions`` wide, moved on by ``stride``.

    Every id but the first is scored once, with at least n_positions - stride ids before it where the text has them
    (with stride = n_positions, the first id of each window has none, and is not scored).
    Raises InputError: a stride beyond the width, fewer than two ids.
    """
    if not 1 <= stride <= n_positions:
        raise InputError(f"a stride of {stride} with windows of {n_positions} positions: must be 1 to {n_positions}")
    _check_length(ids, 2)
    windows, scored_to = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + n_positions, len(ids))
        window = Window(np.asarray(ids[begin:end], np.int64), max(scored_to - begin - 1, 0))
        if window.n_scored > 0:
            windows.append(window)
        scored_to = end
        if end == len(ids):
            break
    return windows


def chunk_windows(ids: Sequence[int], n_positions: int, start: Sequence[int]) -> list[Window]:
    """The windows of llama.cpp's llama-perplexity: whole chunks, of which the second half is scored.

    ``start``: BOS, where the tokenizer has one, which replaces a chunk's first id. Raises InputError for a text shorter
    than a chunk.
    """
    _check_length(ids, max(n_positions, 2))
    windows = []
    for begin in range(0, len(ids) - n_positions + 1, n_positions):
        chunk = np.asarray(ids[begin : begin + n_positions], np.int64)
        chunk[: len(start)] = start
        windows.append(Window(chunk, n_positions // 2))
    return windows


def _check_length(ids: Sequence[int], least: int) -> None:
    if len(ids) < least:
        raise InputError(f"the text has {len(ids)} tokens, these windows need at least {least}")


@dataclass
class Tally:
    """What adds up for one model. ``kl``: divergence of each scored position from the baseline, where there is one."""

    n_scored: int = 0
    sum_nll: float = 0.0
    sum_squared_nll: float = 0.0
    kl: list[Float64s] = field(default_factory=list)
    n_agreed: int = 0
    n_run: int = 0
    seconds: float = 0.0

    def add(self, log_p: Float32s, targets: Ids, baseline: Float32s | None) -> None:
        """Adds positions: log-probabilities [n, vocab] of the model and the baseline, and the ids that follow."""
        nll = -log_p[np.arange(len(targets)), targets].astype(np.float64)
        self.n_scored += len(targets)
        self.sum_nll += float(nll.sum())
        self.sum_squared_nll += float(np.square(nll).sum())
        if baseline is not None:
            self.kl.append(divergence(baseline, log_p))
            self.n_agreed += int(np.count_nonzero(baseline.argmax(1) == log_p.argmax(1)))

    def merge(self, other: Tally) -> None:
        """Adds what another tally has of later positions."""
        self.n_scored += other.n_scored
        self.sum_nll += other.sum_nll
        self.sum_squared_nll += other.sum_squared_nll
        self.kl += other.kl
        self.n_agreed += other.n_agreed
        self.n_run += other.n_run
        self.seconds += other.seconds

    def score(self) -> Score:
        """The results. The standard errors are those of means of independent values, as llama.cpp has them."""
        mean = self.sum_nll / self.n_scored
        variance = max(self.sum_squared_nll / self.n_scored - mean * mean, 0.0)
        perplexity = math.exp(mean) if mean < 700 else math.inf
        error = math.sqrt(variance / max(self.n_scored - 1, 1))
        speed = self.n_run / self.seconds if self.seconds else 0.0
        if not self.kl:
            return Score(self.n_scored, mean, perplexity, perplexity * error, speed)
        kl = np.concatenate(self.kl)
        kl_error = float(kl.std(ddof=1)) / math.sqrt(len(kl)) if len(kl) > 1 else 0.0
        p99 = float(np.quantile(kl, 0.99))
        return Score(
            self.n_scored,
            mean,
            perplexity,
            perplexity * error,
            speed,
            Divergence(float(kl.mean()), kl_error, p99, self.n_agreed / self.n_scored),
        )


@dataclass(frozen=True)
class Divergence:
    """From the baseline: mean KL(baseline || model) in nats, its standard error, its 99th percentile, and the share of
    positions where both think the same token likeliest."""

    kl: float
    kl_error: float
    kl_p99: float
    top1_agreement: float


@dataclass(frozen=True)
class Score:
    """One model's results: mean negative log-likelihood in nats a token, perplexity and its standard error."""

    n_tokens: int
    nll: float
    perplexity: float
    perplexity_error: float
    tokens_per_second: float
    divergence: Divergence | None = None


class WindowScorer:
    """Scores windows with several models side by side, so that no logits are kept; a worker of evaluate_windows.

    With a ``baseline`` its tally comes last. Raises InputError: vocabularies that differ.
    """

    def __init__(self, engines: Sequence[Engine], baseline: Engine | None = None) -> None:
        self.engines = [*engines, *([baseline] if baseline else [])]
        self.has_baseline = baseline is not None
        for engine in self.engines:
            if engine.header.vocab != self.engines[0].header.vocab:
                sizes = f"{self.engines[0].header.vocab} and {engine.header.vocab}"
                raise InputError(f"models with vocabularies of {sizes} tokens cannot be compared")

    def __call__(self, window: Window) -> list[Tally]:
        """The tallies of one window: a batch of scored positions at a time, the baseline first."""
        tallies = [Tally() for _ in self.engines]
        for engine, tally in zip(self.engines, tallies, strict=True):
            engine.reset()
            if window.first:
                _timed_forward(engine, tally, window.ids[: window.first], False)
        end = len(window.ids) - 1
        batch = max(_MAX_LOGITS // self.engines[0].header.vocab, 1)
        for start in range(window.first, end, batch):
            ids = window.ids[start : min(start + batch, end)]
            self._score(tallies, ids, window.ids[start + 1 : start + 1 + len(ids)])
        return tallies

    def _score(self, tallies: list[Tally], ids: Ids, targets: Ids) -> None:
        reference: Float32s | None = None
        for engine, tally in zip(reversed(self.engines), reversed(tallies), strict=True):
            log_p = log_softmax(_timed_forward(engine, tally, ids, True))
            if self.has_baseline and reference is None:
                reference = log_p
                tally.add(log_p, targets, None)
            else:
                tally.add(log_p, targets, reference)


def evaluate(
    engines: Sequence[Engine], windows: Sequence[Window], baseline: Engine | None = None, progress: Progress = SILENT
) -> list[Score]:
    """The score of each engine over ``windows``; with a ``baseline`` its score comes last.

    Raises InputError (vocabularies that differ), DataError (broken logits).
    """
    return evaluate_windows(LocalPool(), lambda: WindowScorer(engines, baseline), windows, progress)


def evaluate_windows(
    pool: Pool, open_scorer: Callable[[], WindowScorer], windows: Sequence[Window], progress: Progress = SILENT
) -> list[Score]:
    """The scores of a scorer's models. What the windows add up to is added in their order, whatever the pool."""
    totals: list[Tally] = []
    progress.start("eval", sum(len(w.ids) for w in windows), "tok")
    try:
        for window, done in zip(windows, pool.map(open_scorer, windows), strict=True):
            totals = totals or [Tally() for _ in done.value]
            for total, tally in zip(totals, done.value, strict=True):
                total.merge(tally)
            progress.advance(len(window.ids))
    finally:
        progress.finish()
    return [total.score() for total in totals]


def _timed_forward(engine: Engine, tally: Tally, ids: Ids, with_logits: bool) -> Float32s:
    started = time.perf_counter()
    logits = engine.forward(ids, "all" if with_logits else "none")
    tally.seconds += time.perf_counter() - started
    tally.n_run += len(ids)
    return logits


def log_softmax(logits: Float32s) -> Float32s:
    """Log-probabilities [n, vocab] in float32, their sums in float64. Raises DataError for broken logits."""
    largest = logits.max(axis=1, keepdims=True)
    if not np.isfinite(largest).all():
        raise DataError("the model's logits are broken (NaN or infinite); `mlb validate` checks the file")
    shifted = logits - largest
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    log_p: Float32s = shifted - np.log(total).astype(np.float32)
    return log_p


def divergence(log_p: Float32s, log_q: Float32s) -> Float64s:
    """KL(p || q) in nats of each position, [n]; not below 0, where rounding would take it."""
    products = np.exp(log_p) * (log_p - log_q)
    sums: Float64s = products.sum(axis=1, dtype=np.float64)
    return np.maximum(sums, 0.0)
