"""``mlb inspect``: what it shows of a model and a tokenizer, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.formats.mlb import LAYOUT
from tests.formats.test_mlb import FULL, MINIMAL, write


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert run(["inspect", *args]) == 0
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    return json.loads(shown(capsys, *args, "--json"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "m.mlb"
    path.write_bytes(write(FULL))
    return str(path)


def test_every_header_field_is_shown_with_its_offset(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in document(capsys, model)["header"]}
    assert {name: row["offset"] for name, row in rows.items()} == {f.name: f.offset for f in LAYOUT.fields}
    assert (rows["dim"]["value"], rows["wtype"]["note"], rows["rope_type"]["note"]) == (64, "Q4_0", "yarn")
    assert rows["q8_mask"]["note"] == "o + down"
    text = shown(capsys, model)
    assert all(f.name in text and f.meaning in text for f in LAYOUT.fields)


def test_tensors_are_listed_on_request(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tensors" not in document(capsys, model)["tables"]
    rows = document(capsys, model, "--tensors")["tables"]["tensors"]
    assert len(rows) == 36
    assert rows[1] == {
        "name": "tok_emb",
        "shape": [40, 64],
        "encoding": "q4_0",
        "offset": 320,
        "bytes": 1280,
        "scale offset": 1600,
        "scale bytes": 160,
    }


def test_sizes_add_up(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, model)
    rows = found["tables"]["bytes by class"]
    assert sum(r["bytes"] for r in rows) <= found["bytes"]
    assert {r["class"] for r in rows} == {
        "tok_emb",
        "qk",
        "v",
        "o",
        "gate_up",
        "down",
        "lb, la",
        "other f32",
        "other u8",
    }
    assert found["summary"]["layers"] == "2: 1 linear attention, 1 with a window of 9"


@pytest.mark.parametrize(
    ("ctx", "cache"),
    [(128, 2 * 32 * 128 * 2), (10, 2 * 32 * 10 * 2)],
)
def test_memory(model: str, ctx: int, cache: int, capsys: pytest.CaptureFixture[str]) -> None:
    from krafla_cli.formats.text import human_bytes

    text = document(capsys, model, "--ctx", str(ctx))["summary"][f"memory at {ctx} positions"]
    # One attention layer has a cache; the linear one a state of 4 x 8 x 16 floats and 3 inputs of 96 channels.
    assert f"cache {human_bytes(cache)} + state {human_bytes(4 * (4 * 8 * 16 + 96 * 3))}" in text


def test_context_beyond_the_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", model, "--ctx", "129"]) == 1
    assert capsys.readouterr().err == "mlb: error: --ctx 129: the model allows 1 to 128\n"


def test_a_broken_model_is_not_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.mlb"
    path.write_bytes(write(replace(MINIMAL))[:5000])
    assert run(["inspect", str(path)]) == 1
    assert "layers.0.w1" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"\x1b[2Jwhat", b"PK\x03\x04"])
def test_unknown_files(tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    assert run(["inspect", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "\x1b" not in error
    assert "known formats: .mlb model" in error


def test_names_with_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a\x1b[31mb.mlb"
    path.write_bytes(write(MINIMAL))
    assert "\x1b" not in shown(capsys, str(path))
    assert document(capsys, str(path))["path"] == str(path)
