"""``mlb imatrix merge`` and ``show``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.formats import mli
from krafla_cli.formats.mli import Dimensions
from tests.convert.test_importance import DIMENSIONS, filled


@pytest.fixture
def parts(tmp_path: Path) -> list[str]:
    paths = []
    for seed in range(3):
        part = filled(DIMENSIONS, seed)
        part.sums *= 10.0 ** (8 * seed)  # so that the order of plain additions would show
        mli.write(part, tmp_path / f"{seed}.mli")
        paths.append(str(tmp_path / f"{seed}.mli"))
    return paths


def test_merge_in_any_order(parts: list[str], tmp_path: Path) -> None:
    results = set()
    for i, order in enumerate(itertools.permutations(parts)):
        assert run(["imatrix", "merge", *order, "-o", str(tmp_path / f"all{i}.mli"), "--quiet"]) == 0
        results.add((tmp_path / f"all{i}.mli").read_bytes())
    assert len(results) == 1
    total = mli.read(tmp_path / "all0.mli")
    assert (total.layer_tokens, total.classifier_tokens) == (21, 15)
    want = sum(np.asarray(mli.read(p).sums, np.longdouble) for p in parts)
    assert np.array_equal(total.sums, want.astype(np.float64))


def test_merge_refuses_other_models_and_old_files(
    parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mli.write(filled(Dimensions(1, 32, 32, 32)), tmp_path / "other.mli")
    assert run(["imatrix", "merge", parts[0], str(tmp_path / "other.mli"), "-o", str(tmp_path / "all.mli")]) == 1
    assert "only those of one model can be added" in capsys.readouterr().err
    assert not (tmp_path / "all.mli").exists()
    assert run(["imatrix", "merge", *parts, "-o", parts[0], "--force"]) == 1
    assert "it is the input itself" in capsys.readouterr().err


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imatrix = filled(DIMENSIONS)
    imatrix.of(0, "ffn_in")[:] = 1.0
    imatrix.of(0, "ffn_in")[[9, 4]] = [129.0, 65.0]  # mean 4
    mli.write(imatrix, tmp_path / "i.mli")
    assert run(["imatrix", "show", str(tmp_path / "i.mli"), "--top", "2", "--json"]) == 0
    rows = {r["input"]: r for r in json.loads(capsys.readouterr().out)["inputs"]}
    row = rows["layers.0.ffn_in"]
    assert row["channels (times the mean)"] == "9 (32.2), 4 (16.2)"
    assert row["mean square"] == pytest.approx(4 / 7)
    assert row["share of top 1%"] == pytest.approx(129 / 256)
    assert list(rows)[-1] == "classifier"
    assert run(["imatrix", "show", str(tmp_path / "i.mli")]) == 0
    assert "9 (32.2)" in capsys.readouterr().out
