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
from tests.embed.students import write_student
from tests.helpers.llama import CONFIG, write

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"


def kill_everywhere(folder: Path, *args: object, signal: str | None = None) -> dict[str, Any]:
    option = [] if signal is None else [f"--signal={signal}"]
    command = [sys.executable, "-m", "tests.helpers.kill_points", *option, str(folder), *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer."""
    config = CONFIG | {"num_hidden_layers": 1, "tie_word_embeddings": True}
    return write(tmp_path_factory.mktemp("tiny") / "hf", config)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Path:
    """The checkpoint as a model."""
    return convert(tiny, tiny.parent / "m.mlb").output


@pytest.mark.parametrize("signal", [None, "SIGINT", "SIGTERM"])
def test_convert(tiny: Path, out: Path, signal: str | None) -> None:
    for old in ("m.mlb", "m.json"):
        (out / old).write_text("old")
    report = kill_everywhere(out, "convert", tiny, "-o", out / "m.mlb", "--force", signal=signal)
    assert report["wrong"] == []
    assert report["points"] >= 18  # 11 tensors, the sidecar, fsyncs and renames
    assert report["files"] == ["m.json", "m.mlb"]


def test_tokenizer(out: Path) -> None:
    report = kill_everywhere(out, "tokenizer", DATA / "demo", "-o", out / "t.mlt")
    assert report["wrong"] == []
    assert report["points"] >= 3  # write, fsync, rename
    assert report["files"] == ["t.mlt"]


def test_imatrix(tmp_path: Path, out: Path) -> None:
    model = convert(DATA / "demo", tmp_path / "m.mlb").output
    (tmp_path / "text.txt").write_text("Once upon a time there was a fox.")
    mli.write(filled(DIMENSIONS), out / "i.mli")
    report = kill_everywhere(
        out, "run", model, "-f", tmp_path / "text.txt", "--imatrix", out / "i.mli", "--force", "--ctx", 16
    )
    assert report["wrong"] == []
    assert report["points"] >= 3
    assert report["files"] == ["i.mli"]


def test_imatrix_merge(tmp_path: Path, out: Path) -> None:
    mli.write(filled(DIMENSIONS), tmp_path / "a.mli")
    report = kill_everywhere(out, "imatrix", "merge", tmp_path / "a.mli", "-o", out / "i.mli")
    assert report == {"points": 4, "wrong": [], "files": ["i.mli"]}


def test_pack_embed(tmp_path: Path, out: Path) -> None:
    student = write_student(tmp_path / "student")
    (out / "m.bin").write_text("old")
    report = kill_everywhere(out, "pack-embed", student, "-o", out / "m.bin", "--force")
    assert report["wrong"] == []
    assert report["points"] >= 30  # header, table, an array each, hash
    assert report["files"] == ["m.bin"]


@pytest.mark.parametrize("signal", [None, "SIGTERM"])
@pytest.mark.parametrize(
    ("to", "name", "files", "n_points"),
    [
        ("gguf", "m.gguf", ["m.gguf"], 17),
        ("mllm", "m.mllm", ["m.mllm"], 25),
        ("safetensors", "hf", ["hf/config.json", "hf/generation_config.json", "hf/model.safetensors"], 20),
    ],
)
def test_export(
    model: Path, out: Path, to: str, name: str, files: list[str], n_points: int, signal: str | None
) -> None:
    if to == "safetensors":
        (out / "hf").mkdir()
    (out / files[0]).write_text("old")
    report = kill_everywhere(out, "export", model, "--to", to, "-o", out / name, "--force", signal=signal)
    assert report["wrong"] == []
    assert report["files"] == files
    assert report["points"] >= n_points
