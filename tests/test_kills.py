"""A process that ends at any write, fsync or rename leaves old files or complete new ones, and nothing for good."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from krafla_cli.convert.pipeline import convert
from krafla_cli.formats import mli
from tests.convert.test_importance import DIMENSIONS, filled
from tests.helpers.llama import CONFIG, write

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"


def kill_everywhere(folder: Path, *args: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.helpers.kill_points", str(folder), *args]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_convert(tmp_path: Path, out: Path) -> None:
    config = CONFIG | {"num_hidden_layers": 1, "tie_word_embeddings": True}
    source = write(tmp_path / "hf", config)
    for old in ("m.mlb", "m.json"):
        (out / old).write_text("old")
    report = kill_everywhere(out, "convert", str(source), "-o", str(out / "m.mlb"), "--force")
    assert report["wrong"] == []
    assert report["points"] >= 18  # 11 tensors, the sidecar, fsyncs and renames
    assert report["files"] == ["m.json", "m.mlb"]


def test_tokenizer(out: Path) -> None:
    report = kill_everywhere(out, "tokenizer", str(DATA / "demo"), "-o", str(out / "t.mlt"))
    assert report["wrong"] == []
    assert report["points"] >= 3  # write, fsync, rename
    assert report["files"] == ["t.mlt"]


@pytest.mark.slow
def test_imatrix(tmp_path: Path, out: Path) -> None:
    model = convert(DATA / "demo", tmp_path / "m.mlb").output
    (tmp_path / "text.txt").write_text("Once upon a time there was a fox.")
    mli.write(filled(DIMENSIONS), out / "i.mli")
    args = ("run", str(model), "-f", str(tmp_path / "text.txt"), "--imatrix", str(out / "i.mli"), "--force")
    report = kill_everywhere(out, *args, "--engine", "reference")
    assert report["wrong"] == []
    assert report["points"] >= 3
    assert report["files"] == ["i.mli"]


def test_imatrix_merge(tmp_path: Path, out: Path) -> None:
    mli.write(filled(DIMENSIONS), tmp_path / "a.mli")
    report = kill_everywhere(out, "imatrix", "merge", str(tmp_path / "a.mli"), "-o", str(out / "i.mli"))
    assert report == {"points": 3, "wrong": [], "files": ["i.mli"]}
