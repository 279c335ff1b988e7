"""``mlb diff``: exactly what was changed is what is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.formats import mli
from krafla_cli.formats.mlb import Header
from krafla_cli.report.diff import diff
from tests.convert.test_importance import DIMENSIONS, filled
from tests.formats.test_mlb import FULL, MINIMAL, write


def model(path: Path, header: Header, **changes: tuple[int, int]) -> Path:
    """A model file; ``changes``: any name -> (offset, byte)."""
    data = bytearray(write(header))
    for offset, value in changes.values():
        data[offset] = value
    path.write_bytes(data)
    return path


def test_the_same_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = model(tmp_path / "a", FULL), model(tmp_path / "b", FULL)
    assert diff(a, b) == {"a": str(a), "b": str(b), "kind": "mlb", "same": True, "tables": {}}
    assert run(["diff", str(a), str(b)]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_one_quant(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a", MINIMAL), model(tmp_path / "b", MINIMAL, quant=(576, 99))  # first byte of layers.0.wq
    (row,) = diff(a, b)["tables"]["tensors"]
    assert (row["tensor"], row["a"], row["b"], row["changed"]) == ("layers.0.wq", "q8_0 32 x 32", "q8_0 32 x 32", 1)
    q = (np.arange(1, 1025) % 256).astype(np.uint8) % 100
    assert row["relative difference"] == pytest.approx(98 / np.sqrt((q.astype(float) ** 2).sum()))


def test_header_and_absent_tensors(tmp_path: Path) -> None:
    a = model(tmp_path / "a", MINIMAL)
    b = model(tmp_path / "b", replace(MINIMAL, shared_classifier=1, norm_eps=0.5))
    tables = diff(a, b)["tables"]
    assert [(r["field"], r["a"], r["b"]) for r in tables["header"]] == [
        ("norm_eps", pytest.approx(1e-5), 0.5),
        ("shared_classifier", 0, 1),
    ]
    assert [(r["tensor"], r["a"], r["b"]) for r in tables["tensors"]] == [("wcls", "q8_0 3 x 32", "absent")]


def test_layer_flags(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a", FULL), model(tmp_path / "b", FULL, flag=(256, 1))
    tables = diff(a, b)["tables"]
    assert tables["header"] == [{"field": "layer flags", "a": "0308", "b": "0108"}]


def test_importance_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = filled(DIMENSIONS), filled(DIMENSIONS)
    other.of(1, "ffn_in")[5] += 1
    other.layer_tokens += 2
    mli.write(one, tmp_path / "a")
    mli.write(other, tmp_path / "b")
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert tables["header"] == [{"field": "layer_tokens", "a": 7, "b": 9}]
    assert [(r["input"], r["channels changed"]) for r in tables["inputs"]] == [("layers.1.ffn_in", 1)]


def test_files_of_two_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mli.write(filled(DIMENSIONS), tmp_path / "i")
    assert run(["diff", str(model(tmp_path / "m", MINIMAL)), str(tmp_path / "i")]) == 1
    assert "only files of one kind can be compared" in capsys.readouterr().err
