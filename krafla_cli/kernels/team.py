"""A team of threads that runs programs: lists of operations, each done by all threads together.

An operation is a native function of three structs: its operands, the step (what changes from call to call: the number
of positions, ...) and the member (which thread this is, its counter of work taken and its scratch memory). Threads take
pieces of an operation's work from the counter; an operation's result does not depend on who took what. Between calls
the threads sleep; inside one they wait for each other spinning, and no Python runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from krafla_cli.kernels.cores import physical_cores
from krafla_cli.kernels.native import Native, Param
from krafla_cli.kernels.structs import Struct, Words, address, struct

# n_tokens positions from ``position`` on are computed in this step. ``fault`` [3] is set by an operation that meets a
# number it cannot represent.
STEP = struct("STEP", n_tokens="i64", position="i64", ids="i64*", fault="i64*")
MEMBER = struct("MEMBER", counter="i64*", thread="i64", n_threads="i64", scratch="u8*")
RUN = Native("threads", "run_program", ("i64*", "i64", "i64", "i64", "i64*", "i64", "i64*", "i64"))
_ALIGNMENT = 64


def operation(module: str, name: str, operands: Struct) -> Native:
    """The operation ``name`` of kernel module ``module``."""
    params: tuple[Param, ...] = (operands, STEP, MEMBER)
    return Native(module, name, params)


@dataclass(frozen=True)
class Call:
    """One operation of a program with its operands. ``barrier``: the next one needs the whole result."""

    native: Native
    operands: Words
    barrier: bool = True


# Addresses of a program's table and counters, address of the step, first and last operation.
_Work: TypeAlias = "tuple[tuple[int, int], int, int, int]"


class Program:
    """Operations to be run in order, as a table of addresses; keeps their operands alive."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        rows = [(c.native.address, address(c.operands), int(c.barrier)) for c in self.calls]
        self.table = np.array(rows, np.int64).reshape(-1, 3)
        self.counters = np.zeros(len(rows), np.int64)
        self.addresses = (address(self.table), address(self.counters))


class Team:
    """``n_threads`` threads, this one among them, with ``scratch_bytes`` of memory each."""

    def __init__(self, n_threads: int | None = None, scratch_bytes: int = 1 << 16) -> None:
        self.n_threads = n_threads or physical_cores()
        self._arrived = np.zeros(1, np.int64)
        self._scratch = aligned_zeros((self.n_threads, scratch_bytes), np.uint8)
        self._members = [
            MEMBER.pack(thread=i, n_threads=self.n_threads, scratch=self._scratch[i]) for i in range(self.n_threads)
        ]
        self._addresses = [(address(member), address(self._arrived)) for member in self._members]
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._pid = 0

    def run(self, program: Program, step: Words, first: int = 0, last: int | None = None) -> None:
        """Runs operations ``first`` to ``last`` (default: all) of ``program``; one call at a time."""
        with self._lock:
            self._start_workers()
            program.counters[:] = 0
            end = len(program.calls) if last is None else last
            work = (program.addresses, address(step), first, end)
            for worker in self._workers:
                worker.start(work)
            self.run_member(0, work)

    def run_member(self, thread: int, work: _Work) -> None:
        """The part of thread ``thread``; returns when all are done."""
        (table, counters), step, first, last = work
        member, arrived = self._addresses[thread]
        RUN(table, first, last, step, member, counters, arrived, self.n_threads)

    def _start_workers(self) -> None:
        # Threads do not survive a fork.
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._workers = [_Worker(self, i) for i in range(1, self.n_threads)]


class _Worker:
    """A thread that sleeps until it is given a program."""

    def __init__(self, team: Team, thread: int) -> None:
        self._team = team
        self._thread = thread
        self._work: _Work | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._loop, name=f"mlb-{thread}", daemon=True).start()

    def start(self, work: _Work) -> None:
        self._work = work
        self._wake.release()

    def _loop(self) -> None:
        while True:
            self._wake.acquire()
            if self._work is not None:
                self._team.run_member(self._thread, self._work)


def aligned_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Zeros whose first element is at a multiple of 64 bytes."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(n_bytes + _ALIGNMENT, np.uint8)
    start = -address(memory) % _ALIGNMENT
    return memory[start : start + n_bytes].view(dtype).reshape(shape)
