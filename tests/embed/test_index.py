"""Building an index: what is in the folder, and builds that are ended at any moment."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from krafla_cli.embed import index as builder
from krafla_cli.embed.embedder import Embedder, open_embedder
from krafla_cli.embed.index import Source, build, quantized
from krafla_cli.embed.search import Searcher, check_model
from krafla_cli.errors import FileError, FormatError, InputError
from krafla_cli.formats import lemb
from krafla_cli.formats.index_folder import FILES, SCALES, Manifest, open_index, read_manifest, validate
from krafla_cli.formats.lemb_layout import FLAG_FINGERPRINT
from krafla_cli.progress import Progress
from tests.embed.students import header_of, random_model

TEXTS = [" ".join(words) for words in itertools.product(("cat", "dog", "a b", "", "merhaba"), repeat=2)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lemb.write("m.bin", random_model(header_of("int4", "ternary")))
    Path("t.txt").write_text("\n".join(TEXTS) + "\n")
    return tmp_path


def built(
    target: str = "ix", model: str = "m.bin", corpus: str = "t.txt", field: str | None = None, **options: Any
) -> tuple[Manifest, int]:
    return build(open_embedder(model), Path(model), Source(Path(corpus), field), Path(target), **options)


def contents(folder: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir())}


# --- what is in an index


def test_float32(folder: Path) -> None:
    manifest, n_before = built(dims=8)
    assert n_before == 0
    assert sorted(p.name for p in Path().iterdir()) == ["ix", "m.bin", "t.txt"]
    assert sorted(contents("ix")) == sorted({*FILES} - {SCALES})
    document = json.loads(Path("ix/manifest.json").read_text())
    assert document == vars(manifest) == {
        "index_version": 1,
        "model_id": "test",
        "model_version": "1.2.0",
        "dims": 8,
        "license_id": 0,
        "has_fingerprint": False,
        "model_sha256": Path("m.bin").read_bytes()[-32:].hex(),
        "model": "../m.bin",
        "dtype": "float32",
        "count": 25,
    }  # fmt: skip
    assert np.array_equal(np.load("ix/vectors.npy"), open_embedder("m.bin").embed(TEXTS, 8))
    assert [json.loads(line)["text"] for line in Path("ix/texts.jsonl").read_bytes().splitlines()] == TEXTS
    opened = open_index("ix")
    assert [opened.text(row) for row in range(25)] == TEXTS
    assert validate("ix").valid


def test_int8(folder: Path) -> None:
    built(dtype="int8")
    codes, scales = np.load("ix/vectors.npy"), np.load("ix/scales.npy")
    rows = open_embedder("m.bin").embed(TEXTS)
    assert codes.dtype == np.int8
    assert np.array_equal(codes, quantized(rows)[0])
    assert np.abs(codes * scales[:, None] - rows).max() <= scales.max() / 2 * 1.001
    exact = scales.astype(float) * (codes.astype(float) @ rows[7].astype(float))
    hits = Searcher(open_index("ix")).search(rows[7], 25)
    assert [hit.text for hit in hits] == [TEXTS[hit.row] for hit in hits]
    assert [hit.score for hit in hits] == pytest.approx(sorted(exact, reverse=True), rel=1e-14)
    assert validate("ix").valid


def test_quantized_by_hand() -> None:
    codes, scales = quantized(np.array([[2.54, -1.27, 0.01], [0, 0, 0]], np.float32))
    assert codes.tolist() == [[127, -64, 0], [0, 0, 0]]  # -63.5 to even
    assert scales.tolist() == [np.float32(2.54) / np.float32(127), 0]


def test_json_lines(folder: Path) -> None:
    Path("t.jsonl").write_text('{"text": "x", "body": "two\\nlines \\u0000"}\n')
    manifest, _ = build(open_embedder("m.bin"), Path("m.bin"), Source(Path("t.jsonl"), "body"), Path("ix"))
    assert manifest.count == 1
    assert open_index("ix").text(0) == "two\nlines \0"


def test_parquet(folder: Path) -> None:
    pq.write_table(pa.table({"body": ["x", "two\nlines"]}), "t.parquet")
    manifest, _ = built(corpus="t.parquet", field="body")
    assert manifest.count == 2
    assert open_index("ix").text(1) == "two\nlines"
    with pytest.raises(FormatError, match=r"t\.parquet: has no column 'text'"):
        built(target="other", corpus="t.parquet")


# --- targets


def test_nothing_is_overwritten(folder: Path) -> None:
    built()
    old = contents("ix")
    with pytest.raises(FileError, match="ix exists already; --force overwrites it"):
        built(dims=4)
    assert contents("ix") == old
    built(dims=4, dtype="int8", force=True)
    assert read_manifest(Path("ix")).dims == 4
    built(dims=4, force=True)
    assert SCALES not in contents("ix")
    assert sorted(p.name for p in Path().iterdir()) == ["ix", "m.bin", "t.txt"]


def test_folders_with_other_things_are_left_alone(folder: Path) -> None:
    Path("other").mkdir()
    Path("other/precious").write_text("x")
    for force in (False, True):
        with pytest.raises(FileError, match=r"other: the folder holds other things \(precious\)"):
            built("other", force=force)
        with pytest.raises(FileError, match=r"t\.txt: it is a file; an index is a folder"):
            built("t.txt", force=force)
        with pytest.raises(FileError, match=r"the folder .*none does not exist"):
            built("none/ix", force=force)
    assert Path("other/precious").read_text() == "x"
    Path("empty").mkdir()
    built("empty")


def test_two_builds_at_once(folder: Path) -> None:
    with builder._locked_folder(folder / "ix.partial"), pytest.raises(FileError, match="another build is writing it"):
        built()


def test_no_texts(folder: Path) -> None:
    Path("t.txt").write_text("")
    with pytest.raises(InputError, match=r"t\.txt: holds no texts"):
        built()
    assert not Path("ix").exists()


# --- builds that are ended


class Ended(BaseException):
    pass


class Counting(Embedder):
    """Counts the texts that it embeds."""

    n_texts = 0

    def _embed_tokens(self, tokens: Any, *args: Any) -> Any:
        Counting.n_texts += len(tokens)
        return super()._embed_tokens(tokens, *args)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "CHUNK", 3)
    monkeypatch.setattr(builder, "CHUNKS_PER_CHECKPOINT", 2)


def counting_build(**options: Any) -> tuple[int, int]:
    """Rows from before, and texts embedded now."""
    Counting.n_texts = 0
    embedder = Counting(lemb.read("m.bin"))
    _, n_before = build(embedder, Path("m.bin"), Source(Path("t.txt")), Path("ix"), **options)
    return n_before, Counting.n_texts


def end_at_checkpoint(monkeypatch: pytest.MonkeyPatch, n: int, **options: Any) -> None:
    """Ends a build just after its n-th checkpoint."""
    counter = itertools.count(1)
    checkpoint = builder._Writer.checkpoint

    def ending(self: builder._Writer) -> None:
        checkpoint(self)
        if next(counter) == n:
            raise Ended

    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr(builder._Writer, "checkpoint", ending)
        built(**options)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_a_build_goes_on(folder: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, n: int, dtype: str) -> None:
    built("whole", dtype=dtype)
    end_at_checkpoint(monkeypatch, n, dtype=dtype)
    assert not Path("ix").exists()
    expected = min(6 * n, 25)
    assert counting_build(dtype=dtype) == (expected, 25 - expected)
    assert contents("ix") == contents("whole")
    assert not Path("ix.partial").exists()


@pytest.mark.parametrize("change", ["dims", "dtype", "model", "first text", "fewer texts", "state", "short file"])
def test_a_build_of_something_else_starts_over(
    folder: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    end_at_checkpoint(monkeypatch, 2)
    options: dict[str, Any] = {"dims": {"dims": 4}, "dtype": {"dtype": "int8"}}.get(change, {})
    texts = list(TEXTS)
    if change == "model":
        lemb.write("m.bin", random_model(header_of("int4", "ternary"), 1), force=True)
    elif change == "first text":
        texts[0] = "water"
    elif change == "fewer texts":
        texts = texts[:11]
    elif change == "state":
        Path("ix.partial/state.json").write_text('{"n_rows": "many"}')
    elif change == "short file":
        os.truncate("ix.partial/vectors.npy", 200)
    Path("t.txt").write_text("\n".join(texts) + "\n")
    assert counting_build(**options) == (0, len(texts))
    built("whole", **options)
    assert contents("ix") == contents("whole")


def test_texts_that_were_added_since_are_embedded(
    folder: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_at_checkpoint(monkeypatch, 2)
    Path("t.txt").write_text("\n".join([*TEXTS, "water"]) + "\n")
    assert counting_build() == (12, 14)


def test_a_fault_in_the_corpus_keeps_what_is_done(folder: Path, small_chunks: None) -> None:
    good = Path("t.txt").read_bytes()
    Path("t.txt").write_bytes(b"\n".join([*(text.encode() for text in TEXTS[:14]), b"\xff", b""]))
    with pytest.raises(FormatError, match=r"t\.txt: line 15: not UTF-8 at byte 0"):
        built()
    assert not Path("ix").exists()
    Path("t.txt").write_bytes(good)
    assert counting_build() == (12, 13)


def calls_that_change_the_disk(monkeypatch: pytest.MonkeyPatch, hit: Any) -> None:
    """Calls ``hit`` before each fsync and each rename."""
    for module, name in ((os, "fsync"), (os, "replace"), (Path, "replace"), (Path, "rename"), (Path, "unlink")):
        before = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _before=before, **k: (hit(), _before(*a, **k))[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("replacing", [False, True])
def test_killed_at_every_moment(
    folder: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, replacing: bool
) -> None:
    """A process is ended at its k-th change to the disk; the next one finishes, and the result is always the same.

    In between, what is there under the index's name is the old one, the new one, or nothing.
    """
    built("whole", dims=4)
    whole, embedder = contents("whole"), open_embedder("m.bin")
    for k in itertools.count(1):
        old = {}
        if replacing:
            built("ix", dims=8, force=True)
            old = contents("ix")
        ended = _child_ends_at(monkeypatch, embedder, k)
        between = contents("ix") if Path("ix").exists() else {}
        assert {n: c for n, c in between.items() if n != "state.json"} in ({}, old, whole)
        if not ended:
            break
        build(embedder, Path("m.bin"), Source(Path("t.txt")), Path("ix"), 4, force=True)
        assert contents("ix") == whole
        assert sorted(p.name for p in Path().iterdir()) == ["ix", "m.bin", "t.txt", "whole"]
        builder._remove(Path("ix"))
    assert k > 10


def _child_ends_at(monkeypatch: pytest.MonkeyPatch, embedder: Embedder, k: int) -> bool:
    """Runs a build in a process of its own; whether it was ended."""
    pid = os.fork()
    if pid == 0:
        counter = itertools.count(1)
        calls_that_change_the_disk(monkeypatch, lambda: os._exit(77) if next(counter) == k else None)
        build(embedder, Path("m.bin"), Source(Path("t.txt")), Path("ix"), 4, force=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 77)
    return status == 77


# --- the contract of section 8

CHANGES: dict[str, dict[str, Any]] = {
    "model_id": {"model_id": b"other".ljust(16, b"\0")},
    "major": {"version_major": 2, "version_minor": 0},
    "dims": {"matryoshka_dims": (4, 6, 0, 0, 0, 0, 0, 0)},
    "license": {"license_id": 7},
    "fingerprint": {"flags": FLAG_FINGERPRINT},
    "minor": {"version_minor": 9},
    "patch": {"version_patch": 9},
}
HARMLESS = {"minor", "patch"}
SETS = [set(c) for n in range(len(CHANGES) + 1) for c in itertools.combinations(CHANGES, n)]


class Warnings(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manifest]:
    model = random_model(header_of())
    yield Manifest(1, "test", "1.2.0", 8, 0, False, model.sha256 or "", "", "float32", 1)


@pytest.mark.parametrize("changes", SETS, ids=lambda c: "+".join(sorted(c)) or "none")
def test_every_combination_of_differing_fields(manifest: Manifest, changes: set[str]) -> None:
    values: dict[str, Any] = {}
    for name in sorted(changes, key=list(CHANGES).index):
        values.update(CHANGES[name])
    model = random_model(header_of(**values))
    if changes <= HARMLESS:
        check_model(manifest, model)
        return
    with pytest.raises(InputError) as caught:
        check_model(manifest, model)
    message = str(caught.value)
    assert message.startswith("Index was built with test v1.2")
    assert message.endswith(". Re-run `mlb index build`.")
    version = f"v{model.header.version_major}.{model.header.version_minor}"
    assert f"but the loaded model is {'other ' if 'model_id' in changes else ''}{version}" in message
    assert ("(8 dimensions" in message or "; 8 dimensions" in message) == ("dims" in changes)
    assert ("fingerprint" in message) == bool(changes & {"license", "fingerprint"})


def test_the_message_is_the_specifications() -> None:
    index = Manifest(1, "lightembed-tr", "1.2.5", 8, 0, False, "0" * 64, "", "float32", 1)
    header = header_of(version_major=2, version_minor=0, model_id=b"lightembed-tr\0\0\0")
    with pytest.raises(InputError) as caught:
        check_model(index, random_model(header))
    expected = "Index was built with lightembed-tr v1.2 but the loaded model is v2.0. Re-run `mlb index build`."
    assert str(caught.value) == expected


def test_another_file_of_the_same_version_is_worth_a_warning(manifest: Manifest) -> None:
    model = random_model(header_of())
    for sha256, version, n in (("1" * 64, 2, 1), ("1" * 64, 3, 0), (None, 2, 0)):
        warnings = Warnings()
        changed = replace(model, sha256=sha256 or manifest.model_sha256, header=header_of(version_minor=version))
        check_model(manifest, changed, warnings)
        assert len(warnings.texts) == n
