"""Teams of threads: every unit of work once, one program at a time, after a fork too."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from krafla_cli.kernels import cores
from krafla_cli.kernels import operations as ops
from krafla_cli.kernels.cores import physical_cores
from krafla_cli.kernels.structs import Words
from krafla_cli.kernels.team import STEP, Call, Program, Team, aligned_zeros

N = 200


class Doubling:
    """A program that doubles x twice: x + rms_norm(x) is 2x where x has an RMS of 1."""

    def __init__(self) -> None:
        self.x = np.ones((N, 32), np.float32)
        self.y = np.ones((N, 32), np.float32)
        self.weight = np.ones(32, np.float32)
        operands = ops.NORM_SUM.pack(y=self.y, weight=self.weight, x=self.x, n_cols=32)
        self.program = Program([Call(ops.NORM_ADD, operands), Call(ops.NORM_ADD, operands)])
        self.step: Words = STEP.pack(n_tokens=N)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 7])
def test_every_unit_is_done_once(n_threads: int) -> None:
    team, work = Team(n_threads), Doubling()
    for i in range(20):
        team.run(work.program, work.step)
        np.testing.assert_array_equal(work.x, 1 + 2 * (i + 1))
    team.run(work.program, work.step, 1, 2)
    np.testing.assert_array_equal(work.x, 42)


def test_calls_from_several_threads_take_turns() -> None:
    team, works = Team(2), [Doubling() for _ in range(4)]

    def run(work: Doubling) -> None:
        for _ in range(50):
            team.run(work.program, work.step)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for work in works:
        np.testing.assert_array_equal(work.x, 101)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    team, work = Team(2), Doubling()
    team.run(work.program, work.step)
    child = os.fork()
    if child == 0:
        team.run(work.program, work.step)
        os._exit(0 if (work.x == 5).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(work.x, 3)


def test_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(cores, "_core_of", lambda cpu: ["0-1", "0-1", "2-3", "2-3"][cpu])
    assert physical_cores() == 2
    monkeypatch.undo()
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)


def test_aligned_zeros() -> None:
    for shape in ((0,), (3, 5), (1,)):
        array = aligned_zeros(shape, np.float32)
        assert array.shape == shape
        assert array.size == 0 or array.ctypes.data % 64 == 0
        assert not array.any()
