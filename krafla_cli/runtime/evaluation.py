"""Perplexity, and divergence from a baseline, over the windows of a text; streamed, in float64 sums."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import DataError, InputError
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


def evaluate(
    engines: Sequence[Engine], windows: Sequence[Window], baseline: Engine | None = None, progress: Progress = SILENT
) -> list[Score]:
    """The score of each engine over ``windows``, side by side, so that the logits of no window are kept.

    With a ``baseline`` its score comes last. Raises InputError (vocabularies that differ), DataError (broken logits).
    """
    everyone = [*engines, *([baseline] if baseline else [])]
    for engine in everyone:
        if engine.header.vocab != everyone[0].header.vocab:
            sizes = f"{everyone[0].header.vocab} and {engine.header.vocab}"
            raise InputError(f"models with vocabularies of {sizes} tokens cannot be compared")
    tallies = [Tally() for _ in everyone]
    progress.start("eval", sum(len(w.ids) for w in windows) * len(everyone), "tok")
    try:
        for window in windows:
            _score_window(everyone, tallies, window, baseline is not None, progress)
    finally:
        progress.finish()
    return [tally.score() for tally in tallies]


def _score_window(
    engines: list[Engine], tallies: list[Tally], window: Window, has_baseline: bool, progress: Progress
) -> None:
    """All engines go through the window together, a batch of scored positions at a time; the baseline first."""
    for engine, tally in zip(engines, tallies, strict=True):
        engine.reset()
        if window.first:
            _timed_forward(engine, tally, window.ids[: window.first], False, progress)
    end = len(window.ids) - 1
    batch = max(_MAX_LOGITS // engines[0].header.vocab, 1)
    for start in range(window.first, end, batch):
        ids = window.ids[start : min(start + batch, end)]
        targets = window.ids[start + 1 : start + 1 + len(ids)]
        reference: Float32s | None = None
        for engine, tally in zip(reversed(engines), reversed(tallies), strict=True):
            log_p = log_softmax(_timed_forward(engine, tally, ids, True, progress))
            if has_baseline and reference is None:
                reference = log_p
                tally.add(log_p, targets, None)
            else:
                tally.add(log_p, targets, reference)


def _timed_forward(engine: Engine, tally: Tally, ids: Ids, with_logits: bool, progress: Progress) -> Float32s:
    started = time.perf_counter()
    logits = engine.forward(ids, "all" if with_logits else "none")
    tally.seconds += time.perf_counter() - started
    tally.n_run += len(ids)
    progress.advance(len(ids))
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
