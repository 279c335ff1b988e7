"""``mlb convert`` as a user sees it: what is printed, and what --verbose and --json add."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from krafla_cli.cli import invoke as run
from tests.helpers.llama import CONFIG, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "Tiny")


def test_what_is_printed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(folder), "-o", str(tmp_path / "m.mlb")]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"wrote {tmp_path}/m.mlb: 39 KB, 66,880 weights, 4.67 bits per weight",
        f"wrote {tmp_path}/m.json",
    ]
    assert err == f"mlb: warning: {folder}: no tokenizer.json: the model is written without a tokenizer\n"


def test_quiet(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(folder), "-o", str(tmp_path / "m.mlb"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_verbose_lists_the_tensors(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["convert", str(folder), "-o", str(tmp_path / "m.mlb"), "--q8-classes", "v", "--verbose"]
    assert run(args) == 0
    rows = {
        line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("layers.")
    }
    assert rows["layers.0.wk"][1:6] == ["q4_0", "32", "x", "64", "4.5"]
    assert rows["layers.0.wv"][1:6] == ["q8_0", "32", "x", "64", "8.5"]
    assert 0.03 < float(rows["layers.0.wk"][6]) < 0.12
    assert float(rows["layers.0.wv"][6]) < 0.01
    assert rows["layers.0.attn_norm"][1:] == ["f32", "64", "32"]  # exact: no error


def test_json_holds_the_same(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(folder), "-o", str(tmp_path / "m.mlb"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    tensors = {t["name"]: t for t in document["tensors"]}
    assert tensors["layers.1.w2"]["bits_per_weight"] == 4.5
    assert 0.03 < tensors["layers.1.w2"]["relative_error"] < 0.12
    assert tensors["final_norm"]["relative_error"] is None
    assert document["header"]["dim"] == CONFIG["hidden_size"]
    assert document["fsync_seconds"] <= document["seconds"]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["nowhere"], 1, "nowhere does not exist; convert takes a Hugging Face folder"),
        (["{folder}", "--wtype", "q5"], 2, "'q5' is not one of 'q8', 'q4'"),
        (["{folder}", "-o", "{tmp}/no/m.mlb"], 1, "the folder {tmp}/no does not exist"),
        (["{folder}", "-o", "{folder}/model.safetensors", "--force"], 1, "it is the input itself"),
        (["{folder}", "-o", "{tmp}/m.mlb", "--imatrix", "{tmp}/none.mli"], 1, "cannot open {tmp}/none.mli"),
    ],
)
def test_failures_are_one_line(
    folder: Path, tmp_path: Path, args: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"folder": str(folder), "tmp": str(tmp_path)}
    before = sorted(tmp_path.rglob("*"))
    assert run(["convert", *(a.format(**places) for a in args)]) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mlb: error: ")
    assert text.format(**places) in error
    assert sorted(tmp_path.rglob("*")) == before
