"""Commands that write: a disk that is full in the middle, a folder that is not there, the input as output."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.formats import mli
from krafla_cli.formats.mlb_file import open_mlb

DATA = Path(__file__).parents[1] / "data"
# What is written with "OUT" in place, and the input that must stay as it is.
COMMANDS = {
    "convert": ("convert demo -o OUT.mlb", "demo/model.safetensors"),
    "tokenizer": ("tokenizer demo/tokenizer.json -o OUT.mlt", "demo/tokenizer.json"),
    "export gguf": ("export m.mlb --to gguf -o OUT.gguf", "m.mlb"),
    "export mllm": ("export m.mlb --to mllm -o OUT.mllm", "m.mlb"),
    "run --imatrix": ("run m.mlb -f text.txt --imatrix OUT.mli --engine reference", "m.mlb"),
    "run --logits": ("run m.mlb -f text.txt --logits OUT.npy --engine reference", "m.mlb"),
    "imatrix merge": ("imatrix merge a.mli b.mli -o OUT.mli", "a.mli"),
    "inspect --report": ("inspect m.mlb --report OUT.html", "m.mlb"),
    "pack-embed": ("pack-embed student -o OUT.bin", "student/model.safetensors"),
    "embed": ("embed s.bin -f many.txt -o OUT.npy", "s.bin"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("demo", "student"):
        shutil.copytree(DATA / name, folder / name)
    assert run(["convert", str(folder / "demo"), "-o", str(folder / "m.mlb"), "-q"]) == 0
    assert run(["pack-embed", str(folder / "student"), "-o", str(folder / "s.bin"), "-q"]) == 0
    (folder / "text.txt").write_text("Once upon a time there was a cat.")
    (folder / "many.txt").write_text("the cat sleeps\n" * 200)
    dimensions = mli.Dimensions.of(open_mlb(folder / "m.mlb").header)
    for name in ("a", "b"):
        sums = np.random.default_rng(ord(name)).random(dimensions.n_sums)
        mli.write(mli.Imatrix(dimensions, sums, 3, 3), folder / f"{name}.mli", force=True)
    return folder


@pytest.fixture
def at_inputs(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(inputs)
    return inputs


@contextmanager
def small_disk() -> Iterator[None]:
    """No file can grow beyond 2,000 bytes: writing more fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def arguments(command: str, out: Path) -> list[str]:
    words = COMMANDS[command][0].split()
    return [w.replace("OUT", str(out)) if "OUT" in w else w for w in words]


def one_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("mlb: error: ")]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_is_full(command: str, at_inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "small").mkdir()
    # First without the limit: it is not to meet the compiler's cache, and the command does work.
    assert run(arguments(command, tmp_path / "large" / "out")) == 0
    capsys.readouterr()
    with small_disk():
        status = run(arguments(command, tmp_path / "small" / "out"))
    assert status == 1
    assert "File too large" in one_line(capsys.readouterr().err)
    assert list((tmp_path / "small").iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_not_there(
    command: str, at_inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(command, tmp_path / "none" / "out")) in (1, 2)
    assert "none" in one_line(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("link", ["symbolic", "hard"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_input_is_never_written_over(
    command: str, link: str, at_inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = at_inputs / COMMANDS[command][1]
    before = source.read_bytes()
    words = arguments(command, tmp_path / "out")
    target = next(Path(w) for w in words if w.startswith(str(tmp_path)))
    if link == "symbolic":
        target.symlink_to(source)
    else:
        os.link(source, target)
    assert run([*words, "--force"]) in (1, 2)
    one_line(capsys.readouterr().err)
    assert source.read_bytes() == before
