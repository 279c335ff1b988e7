"""Choosing the next token from logits: greedy, temperature, top-k, top-p, min-p, repeat penalty. NumPy only.

The steps and their order are those of transformers' generate: repeat penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import DataError, UsageError
from krafla_cli.formats.sidecar import SAMPLING_RULES
from krafla_cli.runtime.engine import Float32s

_NEED_TEMPERATURE = {"top_k", "top_p", "min_p"}
_SHORTLISTS = (64, 1024)  # how many of the likeliest ids are tried before all of them
_BLOCK = 64  # logits that have one maximum, for a quick look where the large ones are
Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SamplingOptions:
    """Temperature 0 is greedy. Off: top_k 0, top_p 1, min_p 0, repetition_penalty 1. Raises UsageError on nonsense."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            allowed, text = SAMPLING_RULES[field.name]
            if not allowed(value):
                raise UsageError(f"{field.name} must be {text}, is {value:g}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


def resolve(defaults: Mapping[str, float], chosen: Mapping[str, float]) -> SamplingOptions:
    """The model's ``defaults`` with what the user has ``chosen``, both by field name.

    top_k, top_p and min_p mean nothing at temperature 0: asked for without a temperature, they imply 1. Raises
    UsageError.
    """
    merged = {**defaults, **chosen}
    asked = chosen if "temperature" in defaults else merged
    if not merged.get("temperature") and "temperature" not in chosen and _NEED_TEMPERATURE & asked.keys():
        merged["temperature"] = 1.0
    top_k = float(merged.pop("top_k", 0))
    if not SAMPLING_RULES["top_k"][0](top_k):
        raise UsageError(f"top_k must be {SAMPLING_RULES['top_k'][1]}, is {top_k:g}")
    others = {f.name: merged[f.name] for f in fields(SamplingOptions) if f.name in merged}
    return SamplingOptions(top_k=int(top_k), **others)


class Sampler:
    """Draws token ids. ``seed`` None takes one from the system; :attr:`seed` says which, to repeat the run."""

    def __init__(self, options: SamplingOptions, seed: int | None = None) -> None:
        self.options = options
        self.seed = secrets.randbits(32) if seed is None else seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    def choose(self, logits: Float32s, seen: Collection[int] = ()) -> int:
        """The next id given ``logits`` [vocab]; ``seen``: the ids of the sequence so far, for the repeat penalty.

        Raises DataError when the logits are NaN or none is finite.
        """
        penalized = self._penalized(_checked(logits), seen)
        if self.options.is_greedy:
            return int(np.argmax(penalized))
        order, weights = self.candidates(penalized)
        cumulative = np.cumsum(weights)
        drawn = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(order[min(int(drawn), len(order) - 1)])

    def candidates(self, logits: Float64s) -> tuple[npt.NDArray[np.intp], Float64s]:
        """The ids that may be drawn, the likeliest first (of equals, the lower id), and their relative weights."""
        options = self.options
        distances = (logits - logits.max()) / options.temperature
        if options.top_k:
            order = _largest(logits, options.top_k)
            weights = np.exp(distances[order])
            total = weights.sum()
        else:
            every = np.exp(distances)
            total = every.sum()
            order = self._likeliest(logits, every, total)
            weights = every[order]
        if options.top_p < 1:
            # A token stays while those before it do not yet reach top_p.
            kept = np.cumsum(weights) - weights < options.top_p * total
            order, weights = order[kept], weights[kept]
        kept = weights >= options.min_p
        return order[kept], weights[kept]

    def _likeliest(self, logits: Float64s, weights: Float64s, total: float) -> npt.NDArray[np.intp]:
        """All ids that may survive, the likeliest first: sorting a few is much faster than sorting a vocabulary."""
        for n in _SHORTLISTS:
            order = _largest(logits, n)
            if weights[order].sum() >= self.options.top_p * total or weights[order[-1]] < self.options.min_p:
                return order
        return _largest(logits, len(logits))

    def _penalized(self, logits: Float64s, seen: Collection[int]) -> Float64s:
        """Each seen id becomes less likely, once: positive logits are divided by the penalty, others multiplied."""
        penalty = self.options.repetition_penalty
        if penalty == 1 or not seen:
            return logits
        ids = np.unique(np.fromiter(seen, np.int64, len(seen)))
        logits = logits.copy()
        limit = np.finfo(np.float64).max / 4  # so that differences of two logits stay finite
        with np.errstate(over="ignore"):
            penalized = np.where(logits[ids] > 0, logits[ids] / penalty, logits[ids] * penalty)
        logits[ids] = np.clip(penalized, -limit, limit)
        return logits


def _checked(logits: Float32s) -> Float64s:
    largest = logits.max()
    if not np.isfinite(largest):
        raise DataError(f"the model's logits are broken (their largest is {largest}); `mlb validate` checks the file")
    return logits.astype(np.float64)


def _largest(values: Float64s, n: int) -> npt.NDArray[np.intp]:
    """The places of the ``n`` largest values, the largest first (of equals, the first); all where there are fewer."""
    found = np.flatnonzero(values >= _bound(values, min(n, len(values))))
    return found[np.argsort(-values[found], kind="stable")][:n]


def _bound(values: Float64s, n: int) -> float:
    """A number that at least ``n`` of the values reach, and not many more: the n-th largest maximum of a block."""
    n_blocks = len(values) // _BLOCK
    if n_blocks < n:
        return float(np.partition(values, -n)[-n])
    maxima = values[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
    return float(np.partition(maxima, -n)[-n])
