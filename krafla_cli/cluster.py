"""A pool of workers on a Ray cluster; the only place that knows Ray.

Plain actors and not Ray Data: a unit of work is fixed before it is sent (a stretch of a file, a window), so that the
result cannot depend on how a data pipeline happened to cut its blocks; each worker holds at most one unit, which bounds
memory; and what comes back is small, or already lies in its file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from krafla_cli.errors import MlbError, UsageError
from krafla_cli.formats.text import printable
from krafla_cli.pool import Done, Pool, Result, Unit
from krafla_cli.progress import SILENT, Progress

# Before Ray is imported, which reads it then: nothing is told to anyone.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
except ImportError:
    raise UsageError('--ray needs Ray: pip install "krafla-cli[ray]"') from None

LOCAL = "local"
MAX_LOST = 3  # workers that one unit, or one place, may lose before the job gives up
# Results that may wait for an earlier one, per worker. More would hide a slower worker, and take more memory.
LOOK_AHEAD = 4
_SLOW_START_SECONDS = 30.0
_START_ATTEMPTS = 3
_CONNECT_SECONDS = 5.0
# What libraries below the workers read when they are first imported.
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class ClusterError(MlbError):
    """The cluster cannot be reached, or workers died again and again."""


@contextlib.contextmanager
def ray_pool(
    address: str = LOCAL, n_workers: int | None = None, threads: int = 1, progress: Progress = SILENT
) -> Iterator[RayPool]:
    """A pool on the cluster at ``address`` (HOST:PORT; "auto": the one of this machine; "local": one of its own).

    ``n_workers``: by default as many as there are processors for, ``threads`` each. Raises ClusterError: no cluster
    there; UsageError: more workers than it has processors for.
    """
    with _no_stdout(), _connected(address, n_workers, threads):
        n_cpus = int(ray.cluster_resources().get("CPU", 0))
        n_most = n_cpus // threads
        if n_most < (n_workers or 1):
            raise UsageError(f"the cluster has {n_cpus} processors: at most {n_most} workers of {threads} threads")
        pool = RayPool(n_workers or n_most, threads, progress)
        try:
            yield pool
        finally:
            pool.close()


@contextlib.contextmanager
def _no_stdout() -> Iterator[None]:
    """Whatever is told to log to nobody, Ray prints that a worker died on stdout, where our documents go."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def _connected(address: str, n_workers: int | None, threads: int) -> Iterator[None]:
    """Ray initialized: its own bars, dashboard and output off; what it does to signals undone."""
    if ray.is_initialized():
        yield
        return
    on_terminate = signal.getsignal(signal.SIGTERM)
    if address == LOCAL:
        _start_local(n_workers and n_workers * threads)
    else:
        _initialize(address)
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        ray.shutdown()


def _start_local(n_cpus: int | None) -> None:
    """A cluster on this machine. On a busy one, Ray's own processes may be too slow for its time limits: once more."""
    for attempt in range(_START_ATTEMPTS):
        try:
            _initialize(LOCAL, include_dashboard=False, num_cpus=n_cpus)
        except ClusterError:
            ray.shutdown()
            if attempt == _START_ATTEMPTS - 1:
                raise
        else:
            return


def _check_reachable(address: str) -> None:
    """Somebody listens at HOST:PORT. Ray itself would wait for minutes. Raises ClusterError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"no Ray cluster at {printable(address)!r}: {printable(str(error))}") from error


def _initialize(address: str, **options: Any) -> None:
    _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except Exception as error:
        reason = printable(" ".join(str(error).split()))
        raise ClusterError(f"no Ray cluster at {printable(address)!r}: {reason}") from error


class _Actor:
    """A worker's process. Its environment is set before anything heavy is imported."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._worker: Callable[[Any], Any] | None = None

    def open(self, open_worker: Callable[[], Callable[[Any], Any]]) -> MlbError | None:
        """Makes the worker; an expected failure is a result, so that Ray does not wrap it."""
        try:
            self._worker = open_worker()
        except MlbError as error:
            return error
        return None

    def do(self, unit: Any) -> tuple[Any, float] | MlbError:
        """The result and its seconds."""
        if self._worker is None:
            raise RuntimeError("do() before open()")
        started = time.perf_counter()
        try:
            value = self._worker(unit)
        except MlbError as error:
            return error
        return value, time.perf_counter() - started


@dataclass
class _Place:
    """One of the pool's workers: an actor, replaced when it dies. ``n_lost``: deaths in a row."""

    number: int
    actor: Any
    n_lost: int = 0


@dataclass
class _Unit:
    index: int
    value: Any
    n_lost: int = 0


class RayPool(Pool):
    """``n_workers`` actors of ``threads`` processors each. What a worker that died had begun is done by another."""

    def __init__(self, n_workers: int, threads: int, progress: Progress = SILENT) -> None:
        self.n_workers = n_workers
        self._threads = threads
        self.progress = progress
        self._environment = {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}
        self.places = [_Place(i, self._new_actor()) for i in range(n_workers)]

    def _new_actor(self) -> Any:
        options = {"num_cpus": self._threads, "max_restarts": 0, "max_task_retries": 0}
        return ray.remote(**options)(_Actor).remote(self._environment)

    def close(self) -> None:
        """Ends the workers."""
        for place in self.places:
            ray.kill(place.actor)

    def map(self, open_worker: Callable[[], Callable[[Unit], Result]], units: Iterable[Unit]) -> Iterator[Done[Result]]:
        """As :meth:`Pool.map`; at most ``LOOK_AHEAD`` results a worker wait for an earlier one.

        Raises ClusterError where a unit or a place has lost ``MAX_LOST`` workers.
        """
        return _Map(self, open_worker, units).results()

    def replace(self, place: _Place) -> None:
        """Puts a new actor in the place of one that died. Raises ClusterError: too many did."""
        place.n_lost += 1
        if place.n_lost > MAX_LOST:
            raise ClusterError(f"worker {place.number} died {place.n_lost} times in a row; see Ray's logs for why")
        self.progress.warn(f"worker {place.number} died; its work is done again")
        place.actor = self._new_actor()


class _Map:
    """One call of RayPool.map: what is running, what is to be done again, what waits for its turn."""

    def __init__(self, pool: RayPool, open_worker: Callable[[], Callable[[Any], Any]], units: Iterable[Any]) -> None:
        self.pool = pool
        self.open_worker = open_worker
        self.units = (_Unit(i, value) for i, value in enumerate(units))
        self.is_exhausted = False
        self.again: list[_Unit] = []
        self.finished: dict[int, Done[Any]] = {}
        self.n_taken = self.n_yielded = 0
        self.idle: list[_Place] = []
        # Reference -> the place where it runs, and the unit (None: the worker is being opened).
        self.running: dict[Any, tuple[_Place, _Unit | None]] = {}

    def results(self) -> Iterator[Done[Any]]:
        """Runs everything."""
        for place in self.pool.places:
            self._open(place)
        while True:
            self._start()
            if self.is_exhausted and not self.again and not any(unit for _, unit in self.running.values()):
                return
            self._wait()
            while self.n_yielded in self.finished:
                self.n_yielded += 1
                yield self.finished.pop(self.n_yielded - 1)

    def _open(self, place: _Place) -> None:
        self.running[place.actor.open.remote(self.open_worker)] = place, None

    def _start(self) -> None:
        """Gives units to idle workers."""
        while self.idle and (unit := self._take()):
            place = self.idle.pop()
            self.running[place.actor.do.remote(unit.value)] = place, unit

    def _take(self) -> _Unit | None:
        """The next unit; None where there is none, or too many results wait for an earlier one."""
        if self.again:
            return self.again.pop(0)
        if self.n_taken - self.n_yielded >= LOOK_AHEAD * self.pool.n_workers:
            return None
        unit = next(self.units, None)
        if unit is None:
            self.is_exhausted = True
        else:
            self.n_taken += 1
        return unit

    def _wait(self) -> None:
        done, _ = ray.wait(list(self.running), timeout=_SLOW_START_SECONDS)
        for reference in done:
            self._collect(reference)
        if not done and not self.idle and not any(unit for _, unit in self.running.values()):
            free = int(ray.available_resources().get("CPU", 0))
            self.pool.progress.warn(f"still waiting for a worker to start; {free} processors of the cluster are free")

    def _collect(self, reference: Any) -> None:
        place, unit = self.running.pop(reference)
        try:
            outcome = ray.get(reference)
        except ray.exceptions.RayTaskError:  # a defect: as it would be in this process
            raise
        except ray.exceptions.RayError:
            self._lost(place, unit)
            return
        if isinstance(outcome, MlbError):
            raise outcome
        if unit is not None:
            place.n_lost = 0
            value, seconds = outcome
            self.finished[unit.index] = Done(value, place.number, seconds)
        self.idle.append(place)

    def _lost(self, place: _Place, unit: _Unit | None) -> None:
        if unit is not None:
            unit.n_lost += 1
            if unit.n_lost > MAX_LOST:
                raise ClusterError(f"{unit.n_lost} workers died at the same piece of work; see Ray's logs for why")
            self.again.append(unit)
        self.pool.replace(place)
        self._open(place)
