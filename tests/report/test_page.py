"""``mlb inspect --report``: a page that needs nothing else, with the model's own numbers."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.convert.compare import errors_against
from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.errors import ShapeError
from krafla_cli.formats import mli
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.report.page import outlier_rows, page, tiles
from krafla_cli.report.svg import Box, squarified
from tests.convert.test_importance import DIMENSIONS, filled
from tests.helpers.llama import CONFIG, tensors, write

VOID = {"meta", "link", "br"}


class Checker(HTMLParser):
    """Every tag is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "hf")


def test_a_page_that_stands_alone(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "m.mlb")
    mli.write(filled(DIMENSIONS), tmp_path / "i.mli")
    args = ["inspect", str(tmp_path / "m.mlb"), "--report", str(tmp_path / "r.html"), "--quiet"]
    assert run([*args, "--against", str(folder), "--imatrix", str(tmp_path / "i.mli")]) == 0
    html = (tmp_path / "r.html").read_text()
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert "script" not in checker.tags
    assert not re.search(r"https?://|src=|@import|url\(", html)
    for heading in (
        "Where the bytes are",
        "Quantization error",
        "Block scales",
        "Outlier rows",
        "Importance",
        "Header",
    ):
        assert f"<h2>{heading}</h2>" in html
    assert run(args) == 1  # no overwriting without --force


def test_errors_are_those_of_the_conversion(folder: Path, tmp_path: Path) -> None:
    result = convert(folder, tmp_path / "m.mlb", options=Options("q4", "f16", q8_mask=8), measure=True)
    errors = errors_against(open_mlb(result.output), folder)
    assert errors == {name: found.relative for name, found in result.errors.items()}
    assert set(errors) == {t.spec.name for t in result.plan.tensors if t.spec.is_quantized}
    assert errors["layers.0.wv"] < 0.01 < errors["layers.0.wk"] < 0.2  # Q8_0 and Q4_0


def test_error_by_hand(folder: Path, tmp_path: Path) -> None:
    result = convert(folder, tmp_path / "m.mlb", options=Options("q8", "f32"), measure=True)
    matrix = open_mlb(result.output).quantized("layers.1.w2")
    w = tensors()["model.layers.1.mlp.down_proj.weight"].astype(np.float64)
    got = matrix.q.astype(np.float64) * np.repeat(matrix.d.astype(np.float64), 32, axis=1)
    want = np.linalg.norm(got - w) / np.linalg.norm(w)
    assert result.errors["layers.1.w2"].relative == pytest.approx(want, rel=1e-4)


def test_a_model_of_another_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    model = open_mlb(convert(folder, tmp_path / "m.mlb").output)
    other = write(tmp_path / "other", CONFIG | {"rope_theta": 5000.0})
    with pytest.raises(ShapeError, match=r"rope_theta is 10000.0, the checkpoint gives 5000.0"):
        errors_against(model, other)


def test_sizes_of_the_map_add_up(folder: Path, tmp_path: Path) -> None:
    model = open_mlb(convert(folder, tmp_path / "m.mlb").output)
    assert sum(t.n_bytes for t in tiles(model)) == sum(s.total_bytes for s in model.tensors.values())
    assert all(sum(p.n_bytes for p in t.parts) == t.n_bytes for t in tiles(model))


@pytest.mark.parametrize("sizes", [[1], [6, 6, 4, 3, 2, 2, 1], [1000, 1], [5] * 9])
def test_boxes_fill_the_map(sizes: list[float]) -> None:
    boxes = squarified(sizes, Box(0, 0, 60, 40))
    assert [round(b.width * b.height, 6) for b in boxes] == [round(2400 * s / sum(sizes), 6) for s in sizes]
    assert all(b.x >= 0 and b.y >= 0 and b.x + b.width <= 60.001 and b.y + b.height <= 40.001 for b in boxes)


def test_an_outlier_row_is_found(tmp_path: Path) -> None:
    weights = tensors()
    weights["model.layers.1.mlp.up_proj.weight"][17] *= 50
    model = open_mlb(convert(write(tmp_path / "hf", weights=weights), tmp_path / "m.mlb").output)
    name, row, times = outlier_rows(model)[0]
    assert (name, row) == ("layers.1.w3", 17)
    assert times > 30


def test_hostile_names_are_escaped(folder: Path, tmp_path: Path) -> None:
    path = convert(folder, tmp_path / "<img src=x>&\x1b.mlb").output
    html = page(open_mlb(path))
    assert "<img" not in html
    assert "\x1b" not in html
    assert "&lt;img src=x&gt;&amp;\\x1b.mlb" in html


def test_usage(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(folder, tmp_path / "m.mlb")
    assert run(["inspect", str(tmp_path / "m.mlb"), "--against", str(folder)]) == 2
    assert run(["inspect", str(tmp_path / "m.mlb"), "--plot", str(tmp_path / "x.bmp")]) == 2
    assert "--plot writes png, svg, pdf" in capsys.readouterr().err


def test_plot(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    convert(folder, tmp_path / "m.mlb")
    assert run(["inspect", str(tmp_path / "m.mlb"), "--plot", str(tmp_path / "x.png"), "--quiet"]) == 0
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
