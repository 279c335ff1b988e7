"""``mlb index`` as a user calls it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.embed.embedder import open_embedder
from krafla_cli.formats import lemb
from tests.embed.students import header_of, random_model

TEXTS = ["cat", "hello world", "merhaba\x1b[31m", "dog", "cat", "", "a b c"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lemb.write("m.bin", random_model(header_of("int4", "ternary")))
    Path("t.txt").write_text("\n".join(TEXTS) + "\n")
    return Path("m.bin")


def index(*args: object) -> int:
    return run(["index", *map(str, args)])


def test_build_and_search(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index("build", model, "t.txt", "-o", "ix", "--dims", 8) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "ix: 7 rows of 8 dimensions, float32\n")
    assert index("search", "ix", "cat", "-k", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["score", "row", "text"]
    assert [line.split() for line in lines[1:3]] == [["+1.0000", "0", "cat"], ["+1.0000", "4", "cat"]]
    assert len(lines) == 4
    assert index("search", "ix", "merhaba\x1b[31m", "-k", 1) == 0
    assert r"merhaba\x1b[31m" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_json_is_one_document(model: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert index("build", model, "t.txt", "-o", "ix", "--dtype", dtype, "--threads", 2, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["n_resumed"]) == ("ix", 0)
    assert told["manifest"] == json.loads(Path("ix/manifest.json").read_text())
    assert index("search", "ix", "hello", "-k", 100, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    rows = open_embedder(model).embed([*TEXTS, "hello"]).astype(float)
    if dtype == "int8":
        rows[:7] = np.load("ix/vectors.npy") * np.load("ix/scales.npy").astype(float)[:, None]
    scores = rows[:7] @ rows[7]
    order = np.lexsort((np.arange(7), -np.round(scores, 13)))
    assert [hit["row"] for hit in told["results"]] == order.tolist()
    assert [hit["text"] for hit in told["results"]] == [TEXTS[row] for row in order]
    assert np.allclose([hit["score"] for hit in told["results"]], scores[order], rtol=0, atol=1e-14)


def test_json_lines_and_standard_input(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.jsonl").write_text('{"text": "cat", "body": "dog"}\n')
    assert index("build", model, "t.jsonl", "-o", "a") == 0
    assert index("build", model, "t.jsonl", "--field", "body", "-o", "b") == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"cat\ndog\n")))
    assert index("build", model, "-", "-o", "c") == 0
    texts = [Path(name, "texts.jsonl").read_text() for name in "abc"]
    assert texts == ['{"text": "cat"}\n', '{"text": "dog"}\n', '{"text": "cat"}\n{"text": "dog"}\n']


def test_the_model_may_move(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sub").mkdir()
    assert index("build", model, "t.txt", "-o", "sub/ix") == 0
    Path("sub").rename("moved")
    assert index("search", "moved/ix", "cat") == 0
    model.rename("n.bin")
    capsys.readouterr()
    assert index("search", "moved/ix", "cat") == 1
    error = capsys.readouterr().err
    assert "m.bin: No such file or directory; the index was built with it, --model names another place" in error
    assert index("search", "moved/ix", "cat", "--model", "n.bin") == 0


def test_another_model_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index("build", model, "t.txt", "-o", "ix") == 0
    lemb.write("new.bin", random_model(header_of("int4", "ternary", version_major=2, version_minor=0)))
    lemb.write("minor.bin", random_model(header_of("int4", "ternary", version_minor=3, version_patch=1)))
    capsys.readouterr()
    assert index("search", "ix", "cat", "--model", "new.bin") == 1
    captured = capsys.readouterr()
    expected = "Index was built with test v1.2 but the loaded model is v2.0. Re-run `mlb index build`."
    assert (captured.out, captured.err) == ("", f"mlb: error: {expected}\n")
    assert index("search", "ix", "cat", "--model", "minor.bin") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["build", "m.bin", "t.txt"], 2, "Missing option '-o'"),
        (["build", "m.bin", "t.txt", "-o", "ix", "--dims", "5"], 1, "dims 5 is not one of this model's: 4, 8, 12"),
        (["build", "m.bin", "t.txt", "-o", "ix", "--dtype", "f16"], 2, "'f16' is not one of"),
        (["build", "m.bin", "t.txt", "-o", "t.txt"], 1, "t.txt: it is a file; an index is a folder"),
        (["build", "m.bin", "t.txt", "-o", "no/ix"], 1, "the folder no does not exist"),
        (["build", "m.bin", "none.txt", "-o", "ix"], 1, "cannot open none.txt"),
        (["build", "t.txt", "t.txt", "-o", "ix"], 1, "header, section table and hash need 98 bytes"),
        (["build", "m.bin", "t.txt", "-o", "ix", "--field", "x"], 1, "t.txt: line 1: not JSON"),
        (["search", "none", "cat"], 1, "cannot open none/manifest.json"),
        (["search", ".", "cat"], 1, ".: is no index, it has no manifest.json"),
        (["search", ".", "\udcff"], 1, "the query: "),
        (["search", ".", "cat", "-k", "0"], 2, "0 is not in the range"),
        (["find"], 2, "No such command 'find'"),
    ],
)
def test_failures(model: Path, args: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert index(*args) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert sorted(p.name for p in Path().iterdir()) == ["m.bin", "t.txt"]


def test_outputs_are_not_overwritten(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index("build", model, "t.txt", "-o", "ix") == 0
    assert index("build", model, "t.txt", "-o", "ix", "--dims", 4) == 1
    assert "ix exists already; --force overwrites it" in capsys.readouterr().err
    assert index("build", model, "t.txt", "-o", "ix", "--dims", 4, "--force") == 0
    assert index("build", model, "t.txt", "-o", ".", "--force") == 1
    assert "the folder holds other things" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["build", "search"])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert index(name, "--help") == 0
    assert capsys.readouterr().out.count(f"mlb index {name} ") >= 3
