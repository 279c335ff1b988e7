"""Choosing the next token from logits: greedy, temperature, top-k, top-p, min-p, repeat penalty. NumPy only.

The steps and their order are those of transformers' generate: repeat penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import DataError, UsageError
from krafla_cli.runtime.engine import Float32s

_NEED_TEMPERATURE = {"top_k", "top_p", "min_p"}
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
        rules = {
            "temperature": (self.temperature >= 0, ">= 0"),
            "top_k": (self.top_k >= 0, ">= 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "> 0"),
        }
        for field in fields(self):
            value = getattr(self, field.name)
            allowed, text = rules[field.name]
            if not (allowed and math.isfinite(value)):
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
    if not top_k.is_integer():
        raise UsageError(f"top_k must be a whole number, is {top_k:g}")
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
        weights = np.exp((logits - logits.max()) / options.temperature)
        order = self._shortlist(logits, weights)
        order = order[np.argsort(-logits[order], kind="stable")]
        if options.top_k:
            order = order[: options.top_k]
        if options.top_p < 1:
            # A token stays while those before it do not yet reach top_p.
            total = weights[order].sum() if options.top_k else weights.sum()
            before = np.cumsum(weights[order]) - weights[order]
            order = order[: int(np.count_nonzero(before < options.top_p * total))]
        order = order[weights[order] >= options.min_p]
        return order, weights[order]

    def _shortlist(self, logits: Float64s, weights: Float64s) -> npt.NDArray[np.intp]:
        """The ids that may survive, ascending: sorting a few is much faster than sorting a vocabulary.

        All ids with a weight under (1 - top_p) x total / vocab together weigh less than 1 - top_p, so none is needed.
        """
        options = self.options
        if 0 < options.top_k < len(logits):
            return np.flatnonzero(logits >= np.partition(logits, -options.top_k)[-options.top_k])
        return np.flatnonzero(weights >= (1 - options.top_p) * weights.sum() / len(weights))

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
