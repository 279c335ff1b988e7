"""``mlb embed`` as a user calls it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.embed.embedder import open_embedder
from krafla_cli.formats import lemb
from tests.embed.students import header_of, random_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lemb.write("m.bin", random_model(header_of("int4", "ternary")))
    return Path("m.bin")


def embed(*args: object) -> int:
    return run(["embed", *map(str, args)])


def test_a_table_with_cosines_to_the_first(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed(model, "hello world", "merhaba\x1b[31m", "", "--dims", 8) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = open_embedder(model).embed(["hello world", "merhaba\x1b[31m", ""], 8)
    assert lines[0].split() == ["text", "cosine", "first", "of", "8", "values"]
    assert lines[1].startswith("hello world ")
    assert "+1.0000" in lines[1]
    assert r"merhaba\x1b[31m" in lines[2]
    assert f"{float(rows[0] @ rows[2]):+.4f}" in lines[3]
    assert lines[3].endswith(" ".join(f"{v:+.4f}" for v in rows[2][:4]))


def test_json_is_one_document(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed(model, "cat", "dog", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == {"model_id": "test", "model_version": "1.2.0", "has_fingerprint": False}
    assert told["dims"] == 12
    rows = np.array([e["embedding"] for e in told["embeddings"]], np.float32)
    assert np.array_equal(rows, open_embedder(model).embed(["cat", "dog"]))


def test_lines_to_npy(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.txt").write_text("cat\n\nhello world\n")
    assert embed(model, "-f", "t.txt", "-o", "o.npy", "--dims", 4, "--threads", 2) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "o.npy: 3 embeddings of 4 dimensions\n")
    assert np.array_equal(np.load("o.npy"), open_embedder(model).embed(["cat", "", "hello world"], 4))


def test_json_lines_in_and_out(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.jsonl").write_text('{"text": "cat", "body": "dog"}\n')
    assert embed(model, "-f", "t.jsonl", "-o", "o.jsonl") == 0
    assert embed(model, "-f", "t.jsonl", "--field", "body", "-o", "p.jsonl", "--json") == 0
    assert json.loads(capsys.readouterr().out)["n_texts"] == 1
    assert json.loads(Path("o.jsonl").read_text())["text"] == "cat"
    assert json.loads(Path("p.jsonl").read_text())["text"] == "dog"


def test_chunks_make_one_output(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("krafla_cli.cli.embed._CHUNK", 2)
    texts = ["cat", "dog", "hello", "world", "a b c"]
    Path("t.txt").write_text("\n".join(texts))
    assert embed(model, "-f", "t.txt", "-o", "o.npy") == 0
    assert np.allclose(np.load("o.npy"), open_embedder(model).embed(texts), atol=1e-6)


def test_standard_input_and_pipes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"cat\ndog\n")))
    assert embed(model, "-f", "-", "-o", "o.npy") == 0
    read, write = os.pipe()
    os.write(write, b"cat\ndog\n")
    os.close(write)
    assert embed(model, "-f", f"/dev/fd/{read}", "-o", "p.npy") == 0
    os.close(read)
    assert np.array_equal(np.load("o.npy"), np.load("p.npy"))
    assert np.load("o.npy").shape == (2, 12)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ([], 2, "give TEXT arguments or -f FILE"),
        (["cat", "-f", "t.txt"], 2, "give TEXT arguments or -f FILE"),
        (["cat", "--field", "x"], 2, "--field goes with -f FILE"),
        (["cat", "--dims", "5"], 1, "dims 5 is not one of this model's: 4, 8, 12"),
        (["cat", "--dims", "384"], 1, "dims 384 is not one of this model's: 4, 8, 12"),
        (["cat", "-o", "o.bin"], 2, "o.bin: embeddings are written as .npy or .jsonl"),
        (["cat", "-o", "none/o.npy"], 1, "the folder none does not exist"),
        (["cat", "-o", "m.bin"], 1, "it is the input itself"),
        (["-f", "none.txt"], 1, "cannot open none.txt: No such file or directory"),
        (["-f", "."], 1, "Is a directory"),
        (["-f", "t.txt", "--field", "text"], 1, "t.txt: line 1: not JSON"),
        (["\udcff"], 1, "text 1: "),
        (["cat", "--threads", "0"], 2, "0 is not in the range"),
    ],
)
def test_failures(model: Path, args: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.txt").write_text("cat\n")
    assert embed(model, *args) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert sorted(p.name for p in Path().iterdir()) == ["m.bin", "t.txt"]


def test_a_fault_late_in_the_file_leaves_no_output(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.txt").write_bytes(b"cat\n" * 5000 + b"\xff\n")
    assert embed(model, "-f", "t.txt", "-o", "o.npy") == 1
    assert "t.txt: line 5001: not UTF-8 at byte 0" in capsys.readouterr().err
    assert not Path("o.npy").exists()


def test_outputs_are_not_overwritten(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("o.npy").write_bytes(b"precious")
    assert embed(model, "cat", "-o", "o.npy") == 1
    assert Path("o.npy").read_bytes() == b"precious"
    assert embed(model, "cat", "-o", "o.npy", "--force") == 0
    Path("t.jsonl").write_text('{"text": "cat"}')
    assert embed(model, "-f", "t.jsonl", "-o", "t.jsonl", "--force") == 1
    assert "it is the input itself" in capsys.readouterr().err


def test_files_that_are_no_models(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(model.read_bytes())
    data[-50] ^= 4
    Path("bad.bin").write_bytes(data)
    Path("empty.bin").write_bytes(b"")
    for name, words in (("bad.bin", "SHA-256"), ("empty.bin", "is empty"), ("none.bin", "cannot open"), (".", "m")):
        assert embed(name, "cat") == 1
        assert words in capsys.readouterr().err


def test_torch_and_click_free_start(model: Path) -> None:
    """Embedding imports no torch, and once its kernels are compiled no numba; the library imports no click."""
    open_embedder(model)
    code = (
        "import sys; from krafla_cli.embed.embedder import open_embedder; "
        "open_embedder('m.bin').embed(['cat']); "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'click', 'numba', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
