"""Jobs on a real Ray cluster on this machine, workers and drivers killed: the bytes of the one-machine run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from krafla_cli import cluster
from krafla_cli.cli import invoke as run
from krafla_cli.cluster import ClusterError, RayPool, ray_pool
from krafla_cli.embed.shards import Options, embed_corpus
from krafla_cli.errors import DataError, FormatError, UsageError
from krafla_cli.globs import expand
from krafla_cli.pool import Done, LocalPool, Pool
from krafla_cli.progress import Progress
from tests.embed.jobs import FAULTS, N_SHARDS, texts, tree, write_corpus, write_model
from tests.helpers.kill_points import Killer
from tests.helpers.models import tiny
from tests.helpers.runnable import small_tokenizer, write_runnable

ROOT = Path(__file__).parents[1]
PATTERNS = ["a.txt", "b.jsonl", "*.parquet"]
STORY = "the cat sat on the mat, the rat sat on the cat; and so on, and on. " * 12


class Remarks(Progress):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of processes of its own, to which this one is connected: two workers, and two for :func:`shared`."""
    with cluster._connected(cluster.LOCAL, 4, 1):
        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def shared(address: str) -> Iterator[RayPool]:
    with ray_pool(address, 2) as opened:
        yield opened


@pytest.fixture
def remarks() -> Remarks:
    return Remarks()


@pytest.fixture
def pool(shared: RayPool, remarks: Remarks) -> RayPool:
    """Two workers, shared by the tests."""
    shared.progress = remarks
    return shared


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------------------------------------------------------
# Workers that die


class DyingPool(Pool):
    """A pool whose workers die: for each file in ``markers`` one, in the middle of a unit."""

    def __init__(self, pool: Pool, markers: Path, n_deaths: int, how: str = "signal") -> None:
        self.pool, self.markers, self.how = pool, markers, how
        markers.mkdir()
        for i in range(n_deaths):
            (markers / str(i)).touch()

    def map(self, open_worker: Callable[[], Callable[[Any], Any]], units: Iterable[Any]) -> Iterator[Done[Any]]:
        yield from self.pool.map(partial(open_dying, open_worker, self.markers, self.how), units)


def open_dying(open_worker: Callable[[], Callable[[Any], Any]], markers: Path, how: str) -> Callable[[Any], Any]:
    worker, marked = open_worker(), False

    def work(unit: Any) -> Any:
        nonlocal marked
        if not marked and (marked := _taken(markers)):
            if how == "signal":
                os.kill(os.getpid(), signal.SIGKILL)
            Killer(2, None).install()  # in the second call that changes the disk: half a shard is written
        return worker(unit)

    return work


def _taken(markers: Path) -> bool:
    """Whether there was a marker, which no other worker has taken meanwhile."""
    for marker in markers.iterdir():
        with contextlib.suppress(FileNotFoundError):
            marker.unlink()
            return True
    return False


# ---------------------------------------------------------------------------------------------------------------------
# The pool


def open_sleeper() -> Callable[[int], int]:
    def work(n: int) -> int:
        time.sleep(0.02 * (n % 3))
        return n * n

    return work


def test_results_come_in_order_and_units_are_taken_as_needed(pool: Pool) -> None:
    taken: list[int] = []
    results = pool.map(open_sleeper, (taken.append(n) or n for n in range(60)))  # type: ignore[func-returns-value]
    assert [next(results).value for _ in range(5)] == [0, 1, 4, 9, 16]
    assert 5 <= len(taken) <= 5 + cluster.LOOK_AHEAD * 2
    rest = list(results)
    assert [done.value for done in rest] == [n * n for n in range(5, 60)]
    assert {done.worker for done in rest} <= {0, 1}
    assert list(pool.map(open_sleeper, [])) == []


def open_failing(when: str) -> Callable[[int], int]:
    if when == "open":
        raise DataError("it is broken")

    def work(n: int) -> int:
        if when == "unit":
            raise DataError(f"{n} is broken")
        return n // 0

    return work


def test_what_a_worker_raises_is_raised(pool: Pool) -> None:
    with pytest.raises(DataError, match="it is broken"):
        list(pool.map(partial(open_failing, "open"), [1]))
    with pytest.raises(DataError, match=r"^7 is broken$"):
        list(pool.map(partial(open_failing, "unit"), [7]))
    with pytest.raises(ZeroDivisionError):  # a defect stays one
        list(pool.map(partial(open_failing, "defect"), [7]))


def open_dead(where: str) -> Callable[[int], int]:
    if where == "open":
        os._exit(1)
    return lambda n: os._exit(1)


@pytest.mark.slow
def test_retries_are_bounded(address: str, remarks: Remarks) -> None:
    with ray_pool(address, 1) as own, pytest.raises(ClusterError, match=r"^worker 0 died 4 times in a row"):
        list(own.map(partial(open_dead, "open"), [1]))
    with (
        ray_pool(address, 1, progress=remarks) as own,
        pytest.raises(ClusterError, match=r"^4 workers died at the same piece of work"),
    ):
        list(own.map(partial(open_dead, "unit"), [1]))
    assert remarks.warnings == ["worker 0 died; its work is done again"] * 3


def test_more_workers_than_processors(address: str) -> None:
    with (
        pytest.raises(UsageError, match="the cluster has 4 processors: at most 1 workers of 3 threads"),
        ray_pool(address, 2, 3),
    ):
        pass


def test_nothing_is_told_to_anyone(address: str) -> None:
    from ray._common.usage import usage_lib

    assert not usage_lib.usage_stats_enabled()


# ---------------------------------------------------------------------------------------------------------------------
# Embedding


def embed(pool: Pool, out: str, **asked: Any) -> Any:
    return embed_corpus(expand(PATTERNS), Path(out), Options(Path("m.bin"), texts_per_shard=16, **asked), pool)


@pytest.mark.parametrize("how", ["signal", "half a file"])
def test_embedding_with_workers_that_die(pool: Pool, folder: Path, remarks: Remarks, how: str) -> None:
    write_model(Path("m.bin"))
    write_corpus(folder)
    embed(LocalPool(), "one")
    report = embed(DyingPool(pool, folder / "markers", 2, how), "out")
    assert tree(Path("out")) == tree(Path("one"))
    assert (report.n_texts, report.messages) == (119, FAULTS)
    # A worker that is to die at a write lives on where all that is left for it are files that cannot be read.
    assert len(remarks.warnings) >= (2 if how == "signal" else 1)
    assert not list((folder / "markers").iterdir())


def test_strict_embedding(pool: Pool, folder: Path) -> None:
    write_model(Path("m.bin"))
    write_corpus(folder)
    with pytest.raises(FormatError, match=r"^d\.parquet: no Parquet file"):
        embed(pool, "out", strict=True)
    Path("d.parquet").unlink()
    with pytest.raises(FormatError, match=r"^a\.txt: line 18: not UTF-8 at byte 4"):
        embed(pool, "two", strict=True)


def test_a_driver_that_is_killed_and_started_again(
    address: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed as a process, while its workers write shards; a second driver makes the rest."""
    write_model(Path("m.bin"))
    Path("a.txt").write_text("\n".join(texts(2400, 4)))
    args = ["embed", "m.bin", "-f", "a.txt", "--shard-texts", "8"]
    assert run([*args, "-o", "one"]) == 0
    on_ray = [*args, "-o", "out", "--workers", "2", "--ray", address]
    driver = subprocess.Popen(
        [sys.executable, "-m", "krafla_cli", *on_ray], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    while len(list(Path("out").glob("part-*"))) < 5:
        assert driver.poll() is None
        time.sleep(0.005)
    driver.kill()
    driver.wait()
    n_there = len(list(Path("out").glob("part-*")))
    assert 5 <= n_there < 300
    assert json.loads(Path("out/manifest.json").read_text())["complete"] is False
    capsys.readouterr()
    assert run([*on_ray, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["n_shards"] == 300
    assert n_there <= told["n_shards_kept"] < 300
    assert tree(Path("out")) == tree(Path("one"))


# ---------------------------------------------------------------------------------------------------------------------
# Windows


@pytest.fixture
def model(folder: Path) -> Path:
    Path("t.txt").write_text(STORY)
    (folder / "q8").mkdir()
    return write_runnable(folder / "q8", tiny(vocab=small_tokenizer().get_vocab_size()))


def test_an_importance_matrix(address: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["run", str(model), "-f", "t.txt", "--ctx", "16"]
    assert run([*args, "--imatrix", "one.mli"]) == 0
    on_ray = ["--workers", "2", "--ray", address]
    assert run([*args, "--imatrix", "two.mli", *on_ray]) == 0
    assert Path("two.mli").read_bytes() == Path("one.mli").read_bytes()
    assert "tok/s" in capsys.readouterr().err


@pytest.mark.slow
def test_an_importance_matrix_of_one_worker_and_more_text(address: str, model: Path) -> None:
    args = ["run", str(model), "-f", "t.txt", "--ctx", "16", "--imatrix"]
    on_ray = ["--workers", "1", "--ray", address]
    for name, more in (("one.mli", []), ("ray.mli", on_ray)):
        assert run([*args, name, *more]) == 0
        assert run([*args, name, "--append", *more]) == 0
    assert Path("ray.mli").read_bytes() == Path("one.mli").read_bytes()


def test_an_importance_matrix_with_workers_that_die(pool: Pool, model: Path, folder: Path) -> None:
    from krafla_cli.formats.mli import Dimensions, Imatrix
    from krafla_cli.runtime.imatrix import record_windows, windows
    from krafla_cli.runtime.model import open_model
    from krafla_cli.runtime.workers import open_recorder

    parts = list(windows(np.arange(600) % 250, 16))
    open_worker = partial(open_recorder, model.absolute(), model.stat().st_size, True, {"n_ctx": 16, "threads": 1})
    totals = []
    for where in (LocalPool(), DyingPool(pool, folder / "markers", 2)):
        totals.append(Imatrix.empty(Dimensions.of(open_model(model).config)))
        record_windows(where, open_worker, parts, totals[-1])
    assert totals[0].to_bytes() == totals[1].to_bytes()
    assert totals[0].layer_tokens == 600
    assert not list((folder / "markers").iterdir())
    with pytest.raises(DataError, match=r"m\.mlb: \d+ bytes on a worker, 7 where the command began"):
        list(pool.map(partial(open_recorder, model.absolute(), 7, True, {}), parts))


def _without_timing(out: str) -> Any:
    document = json.loads(out)
    for row in [*document["models"], *filter(None, [document["baseline"]])]:
        assert row.pop("tokens_per_second") > 0
    return document


@pytest.mark.parametrize(
    "method",
    [["--windows", "sliding", "--stride", "5"], pytest.param(["--windows", "chunks"], marks=pytest.mark.slow)],
)
def test_evaluation(
    address: str, model: Path, folder: Path, method: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other").mkdir()
    other = write_runnable(folder / "other", tiny(vocab=small_tokenizer().get_vocab_size()), seed=1)
    args = ["eval", str(model), str(other), str(model), "-f", "t.txt", "--ctx", "16", *method, "--json"]
    baseline = ["--baseline", str(other)]
    assert run([*args, *baseline]) == 0
    one = _without_timing(capsys.readouterr().out)
    assert one["n_windows"] > 20
    assert run([*args, *baseline, "--workers", "2", "--ray", address]) == 0
    assert _without_timing(capsys.readouterr().out) == one


def test_usage(address: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(Path("m.bin"))
    cases = (
        (["run", "q8/m.mlb", "-p", "x", "--ray", "auto"], "--ray and --workers are for --imatrix"),
        (["run", "q8/m.mlb", "-f", "t.txt", "--imatrix", "o.mli", "--workers", "2"], "--workers goes with --ray"),
        (["eval", "--ray", "q8/m.mlb", "-f", "t.txt"], "'q8/m.mlb' is neither HOST:PORT nor auto nor local; write a"),
        (["embed", "m.bin", "-f", "t.txt", "-o", "o.npy", "--ray"], "are for -f FILE with a folder, -o out/"),
        (["embed", "m.bin", "-f", "-", "-o", "out", "--ray", address], "- can be read once only"),
        (
            ["embed", "m.bin", "-f", "t.txt", "-o", "out", "--workers", "9", "--ray", address],
            "at most 4 workers of 1 t",
        ),
    )
    for args, words in cases:
        assert run(args) == 2
        assert words in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize(("package", "extra"), [("ray", "ray"), ("pyarrow", "parquet")])
def test_without_the_extra(folder: Path, package: str, extra: str) -> None:
    write_model(Path("m.bin"))
    Path("t.txt").write_text("cat\n")
    code = (
        f"import sys; sys.modules[{package!r}] = None; from krafla_cli.cli import invoke; "
        "sys.exit(invoke('embed m.bin -f t.txt -o out'.split() + ['--ray'] * (sys.argv[1] == 'ray')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, package]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 2
    assert result.stderr.endswith(f': pip install "krafla-cli[{extra}]"\n')
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_cluster_of_the_command_itself(folder: Path) -> None:
    write_model(Path("m.bin"))
    write_corpus(folder)
    args = ["embed", "m.bin", *(a for p in PATTERNS for a in ("-f", p)), "--shard-texts", "16"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "krafla_cli", *args]
    assert subprocess.run([*command, "-o", "one"], check=True, env=environment).returncode == 0
    result = subprocess.run(
        [*command, "-o", "out", "--workers", "2", "--ray"], capture_output=True, text=True, check=True, env=environment
    )
    assert tree(Path("out")) == tree(Path("one"))
    lines = result.stderr.splitlines()
    assert [line.removeprefix("mlb: warning: ") for line in lines[:4]] == FAULTS
    assert lines[4] == f"out: 119 embeddings in {N_SHARDS} shards"
    assert result.stdout == ""
    result = subprocess.run(
        [*command, "-o", "none", "--ray", "127.0.0.1:1"], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("mlb: error: no Ray cluster at '127.0.0.1:1': ")
