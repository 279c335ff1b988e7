"""Workers that do independent units of work, and give the results in the order of the units.

What a job computes is written once, over :class:`Pool`; where it runs, in this process or on a cluster, is the
caller's choice, and cannot change the result.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Unit = TypeVar("Unit")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Done(Generic[Result]):
    """The result of one unit, which worker (from 0) made it, and in how many seconds."""

    value: Result
    worker: int
    seconds: float


class Pool(ABC):
    """Some workers. ``open_worker`` makes, in each worker's process, the function that does a unit."""

    n_workers: int

    @abstractmethod
    def map(self, open_worker: Callable[[], Callable[[Unit], Result]], units: Iterable[Unit]) -> Iterator[Done[Result]]:
        """Results in the order of ``units``, which are taken as they are needed. Raises what the worker raises."""


class LocalPool(Pool):
    """One worker: this process."""

    n_workers = 1

    def map(self, open_worker: Callable[[], Callable[[Unit], Result]], units: Iterable[Unit]) -> Iterator[Done[Result]]:
        """Does one unit after the other."""
        worker = open_worker()
        for unit in units:
            started = time.perf_counter()
            value = worker(unit)
            yield Done(value, 0, time.perf_counter() - started)


@dataclass
class Speeds:
    """How much each worker did: worker -> amount (texts, tokens) and busy seconds."""

    amounts: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def add(self, done: Done[Any], amount: int) -> None:
        """Counts one unit."""
        self.amounts[done.worker] = self.amounts.get(done.worker, 0) + amount
        self.seconds[done.worker] = self.seconds.get(done.worker, 0.0) + done.seconds

    @property
    def per_worker(self) -> list[float]:
        """Amount per busy second of each worker that did something, by worker."""
        return [self.amounts[w] / max(self.seconds[w], 1e-9) for w in sorted(self.amounts)]

    def text(self, unit: str) -> str:
        """For people: "2 workers, 1480 to 1510 texts/s each"; empty where nothing was done."""
        rates = self.per_worker
        if not rates:
            return ""
        low, high = round(min(rates)), round(max(rates))
        each = f"{low}" if low == high else f"{low} to {high}"
        return f"{len(rates)} worker{'s' * (len(rates) > 1)}, {each} {unit}/s{' each' * (len(rates) > 1)}"
