"""``mlb validate``: a line for each file, folders, JSON, exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from krafla_cli.cli import invoke as run
from tests.formats.test_mlb import MINIMAL, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.mlb").write_bytes(write(MINIMAL))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "cut.mlb").write_bytes(write(MINIMAL)[:-100])
    (tmp_path / "notes.txt").write_text("no model")
    return tmp_path


def test_one_good_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(folder / "good.mlb")
    assert run(["validate", good]) == 0
    assert capsys.readouterr().out == f"{good}: ok (mlb)\n"
    assert run(["validate", good, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_a_folder_is_searched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}/good.mlb: ok (mlb)"
    assert lines[1].startswith(
        f"{folder}/sub/cut.mlb: ML_E_FORMAT: wcls at offset 7744: ends at byte 7884, the file has "
    )
    assert len(lines) == 3


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", str(folder), str(folder / "none.mlb"), "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)
    assert [(Path(r["path"]).name, r["valid"], r["status"]) for r in reports] == [
        ("good.mlb", True, "ML_OK"),
        ("cut.mlb", False, "ML_E_FORMAT"),
        ("none.mlb", False, "ML_E_IO"),
    ]
    fault = reports[1]["faults"][0]
    assert (fault["where"], fault["offset"]) == ("wcls", 7744)


def test_nothing_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"mlb: error: no files of a known format in {tmp_path}\n"


def test_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.mlb")
    assert run(["validate", str(tmp_path / "pipe.mlb")]) == 1
    assert "it is no regular file" in capsys.readouterr().out


def test_all_faults_have_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(write(MINIMAL))
    data[8:12] = bytes(4)  # dim
    data[28:32] = bytes(4)  # vocab
    (tmp_path / "m.mlb").write_bytes(data)
    assert run(["validate", str(tmp_path / "m.mlb")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1:3] for line in lines] == [
        ["ML_E_SHAPE", "dim at offset 8"],
        ["ML_E_SHAPE", "vocab at offset 28"],
    ]
