"""Jobs of shards on one machine: what is in them, going on after an end, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from krafla_cli import open_embedder
from krafla_cli.embed import shards
from krafla_cli.embed.shards import Options, Report, embed_corpus
from krafla_cli.errors import DataError, FileError, FormatError, InputError, MlbError
from krafla_cli.globs import expand
from krafla_cli.pool import LocalPool
from krafla_cli.progress import SILENT, Progress
from tests.embed.jobs import FAULTS, N_SHARDS, tree, write_corpus, write_model

ROOT = Path(__file__).parents[2]
PATTERNS = ["a.txt", "b.jsonl", "*.parquet"]


class Remarks(Progress):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In a folder with m.bin and the corpus; the texts that can be read."""
    monkeypatch.chdir(tmp_path)
    write_model(Path("m.bin"))
    return write_corpus(tmp_path)


def embed(
    out: str = "out",
    patterns: list[str] = PATTERNS,
    force: bool = False,
    progress: Progress = SILENT,
    **asked: object,
) -> Report:
    options = replace(Options(Path("m.bin"), texts_per_shard=16), **asked)  # type: ignore[arg-type]
    return embed_corpus(expand(patterns), Path(out), options, LocalPool(), force, progress)


def test_contents(readable: list[str]) -> None:
    remarks = Remarks()
    report = embed(dims=8, progress=remarks)
    assert (report.n_texts, report.n_unreadable, report.n_shards, report.n_kept) == (119, 3, N_SHARDS, 0)
    assert remarks.warnings == report.messages == FAULTS
    table = pa.concat_tables(
        [pq.read_table(p).replace_schema_metadata() for p in sorted(Path("out").glob("*.parquet"))]
    )
    assert table.schema.names == ["id", "text_sha256", "vector"]
    ids = [i for i in range(122) if i not in (17, 81, 121)]  # line numbers through all files, from 0
    assert table["id"].to_pylist() == ids
    assert table["text_sha256"].to_pylist() == [hashlib.sha256(t.encode()).digest() for t in readable]
    rows = np.array(table["vector"].to_pylist(), np.float32)
    assert rows.shape == (119, 8)
    np.testing.assert_allclose(rows, open_embedder("m.bin").embed(readable, 8), atol=1e-6)


def test_manifest(readable: list[str]) -> None:
    embed(dims=8)
    manifest = json.loads(Path("out/manifest.json").read_text())
    corpus = manifest.pop("corpus")
    assert manifest == {
        "index_version": 1,
        "model_id": "test",
        "model_version": "1.2.0",
        "model_sha256": Path("m.bin").read_bytes()[-32:].hex(),
        "dims": 8,
        "license_id": 0,
        "has_fingerprint": False,
        "texts_per_shard": 16,
        "complete": True,
        "count": 119,
        "n_unreadable": 3,
        "n_unreadable_files": 1,
        "unreadable": FAULTS,
        "n_shards": N_SHARDS,
    }
    assert [(f["path"], f["field"], f["n_texts"]) for f in corpus] == [
        ("a.txt", None, 41),
        ("b.jsonl", "text", 41),
        ("c.parquet", "text", 40),
        ("d.parquet", "text", 0),
    ]
    assert corpus[0]["sha256"] == hashlib.sha256(Path("a.txt").read_bytes()).hexdigest()


def test_shards_do_not_depend_on_threads_or_on_what_is_there(readable: list[str]) -> None:
    embed("one")
    embed("two", threads=3)
    assert tree(Path("two")) == tree(Path("one"))
    for name in ("part-000000.parquet", "part-000004.parquet", "part-000008.parquet"):
        Path("two", name).unlink()
    kept = {p: p.stat().st_mtime_ns for p in Path("two").glob("part-*")}
    remarks = Remarks()
    report = embed("two", progress=remarks)
    assert (report.n_kept, report.n_shards, report.n_texts) == (6, 9, 119)
    assert remarks.warnings == [FAULTS[0], FAULTS[3]]  # of what was done now
    assert report.messages == FAULTS
    assert tree(Path("two")) == tree(Path("one"))
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    assert embed("two").n_kept == 9
    assert tree(Path("two")) == tree(Path("one"))


def test_chunks_bound_memory(readable: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    embedder_embed = shards.Embedder.embed
    monkeypatch.setattr(shards, "_CHUNK_TEXTS", 5)
    monkeypatch.setattr(shards, "_CHUNK_CHARS", 60)
    monkeypatch.setattr(
        shards.Embedder,
        "embed",
        lambda self, *args: (sizes.append(len(args[0])), embedder_embed(self, *args))[1],
    )
    Path("long.txt").write_text("\n".join(["a"] * 7 + ["b " * 50, "c " * 40, "d"]))
    embed(patterns=["long.txt"])
    assert sizes == [5, 2, 1, 1, 1]


def test_a_kill_at_any_write_or_rename(readable: list[str]) -> None:
    """Each time: no shard is torn, and the same command then makes what an undisturbed one makes."""
    args = ["embed", "m.bin", "-f", "a.txt", "--shard-texts", "24", "--dims", "4", "-o", "out"]
    command = [sys.executable, "-m", "tests.helpers.kill_points", "--resume", "out", *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["wrong"] == []
    assert told["points"] >= 3 * (2 + 2)  # write, fsync and rename of each shard and both manifests
    assert told["files"] == ["manifest.json", *(f"part-{i:06d}.parquet" for i in range(2))]


def _other_model() -> None:
    Path("m.bin").unlink()
    write_model(Path("m.bin"), 5)


@pytest.mark.parametrize(
    ("change", "asked", "words"),
    [
        (_other_model, {}, r"model: test 1\.2\.0 \(SHA-256 \w{64}\) there, test 1\.2\.0 \(SHA-256 \w{64}\) now"),
        (None, {"dims": 4}, "dims: 12 there, 4 now"),
        (None, {"texts_per_shard": 17}, "texts in a shard: 16 there, 17 now"),
        (None, {"patterns": ["a.txt"]}, "number of files: 4 there, 1 now"),
        (None, {"patterns": ["b.jsonl", "a.txt", "*.parquet"]}, r"file 1 of the corpus: \d+ bytes, lines, SHA-"),
        (
            lambda: Path("a.txt").write_text("new\n"),
            {},
            r"file 1 of the corpus: .* there, 4 bytes, lines",
        ),
        (lambda: Path("out/manifest.json").write_text("{}"), {}, r"out/manifest\.json is no manifest of embeddings"),
    ],
)
def test_another_job_is_refused(
    readable: list[str], change: Callable[[], object] | None, asked: dict[str, object], words: str
) -> None:
    embed()
    if change is not None:
        change()
    before = tree(Path("out"))
    with pytest.raises(InputError, match=words) as raised:
        embed(**asked)  # type: ignore[arg-type]
    assert "give another folder with -o, or --force" in str(raised.value)
    assert tree(Path("out")) == before
    embed(force=True, **asked)  # type: ignore[arg-type]
    embed("fresh", **asked)  # type: ignore[arg-type]
    assert tree(Path("out")) == tree(Path("fresh"))


def test_moved_files_are_the_same_corpus(readable: list[str]) -> None:
    embed()
    Path("moved").mkdir()
    for name in ("a.txt", "b.jsonl", "c.parquet", "d.parquet"):
        Path(name).rename(f"moved/{name}")
    assert embed(patterns=[f"moved/{p}" for p in PATTERNS]).n_kept == N_SHARDS


def test_folders_of_others_are_left_alone(readable: list[str]) -> None:
    Path("out").mkdir()
    Path("out/precious").touch()
    for force in (False, True):
        with pytest.raises(InputError, match=r"out holds 'precious' and no manifest\.json"):
            embed(force=force)
    with pytest.raises(FileError, match=r"cannot write the folder none/out: No such file"):
        embed("none/out")
    with pytest.raises(FileError, match=r"cannot write the folder a\.txt: File exists"):
        embed("a.txt")


def test_shards_that_are_none_of_the_job(readable: list[str]) -> None:
    embed()
    first, second = Path("out/part-000000.parquet"), Path("out/part-000001.parquet")
    data = first.read_bytes()
    first.write_bytes(data[:-9])
    with pytest.raises(
        InputError, match=r"out/part-000000\.parquet is no shard of embeddings, or is damaged; remove it"
    ):
        embed()
    first.write_bytes(second.read_bytes())
    with pytest.raises(InputError, match=r"out/part-000000\.parquet is a shard of another job; remove it"):
        embed()
    first.unlink()
    embed()
    assert first.read_bytes() == data


def test_strict_stops_at_the_first_fault(readable: list[str]) -> None:
    with pytest.raises(FormatError, match=r"^d\.parquet: no Parquet file"):
        embed(strict=True)
    assert not list(Path("out").glob("part-*"))
    with pytest.raises(FormatError, match=r"^a\.txt: line 18: not UTF-8"):
        embed("two", ["a.txt"], strict=True)
    embed("two", ["a.txt"])
    with pytest.raises(FormatError, match=r"^a\.txt: line 18: not UTF-8"):  # it was left out of a shard that is there
        embed("two", ["a.txt"], strict=True)


@pytest.mark.parametrize(
    ("patterns", "asked", "words"),
    [
        (["none.txt"], {}, r"cannot read none\.txt: No such file"),
        (["e.txt"], {}, "the corpus has no texts"),
        (["d.parquet"], {}, r"d\.parquet: no Parquet file"),
        (["a.txt"], {"dims": 5}, "dims 5 is not one of this model's: 4, 8, 12"),
        (["a.txt"], {"model": Path("none.bin")}, r"cannot open .*none\.bin"),
    ],
)
def test_failures_leave_nothing(readable: list[str], patterns: list[str], asked: dict[str, object], words: str) -> None:
    Path("e.txt").touch()
    with pytest.raises(MlbError, match=words):
        embed("out", patterns, **asked)  # type: ignore[arg-type]
    assert not Path("out").exists()


def test_a_worker_with_another_model_is_refused(readable: list[str]) -> None:
    with pytest.raises(DataError, match=r"m\.bin: SHA-256 \w{64} on a worker, 00 where it began"):
        shards.open_shard_worker(Options(Path("m.bin")), "00", "key", Path())
