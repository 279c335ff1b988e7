"""``mlb fingerprint`` as a user calls it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.embed.registry import read_registry
from tests.embed.students import write_student


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A registry with licenses 7 and 8, a plain model, and the copy of license 7."""
    monkeypatch.chdir(tmp_path)
    write_student(tmp_path / "student")
    for license_id, customer in ((7, "Acme"), (8, "Other")):
        assert new_key(license_id, customer) == 0
    for name, options in (("plain.bin", []), ("acme.bin", ["--license-id", "7", "--registry", "keys.jsonl"])):
        assert run(["pack-embed", "student", "-o", name, *options]) == 0
    capsys.readouterr()
    return tmp_path


def new_key(license_id: object, customer: str, *more: str) -> int:
    return run(
        [
            "fingerprint",
            "new-key",
            "--registry",
            "keys.jsonl",
            "--license-id",
            str(license_id),
            "--customer",
            customer,
            *more,
        ]
    )


def detect(suspect: str, *more: str) -> int:
    return run(["fingerprint", "detect", suspect, "--reference", "plain.bin", "--registry", "keys.jsonl", *more])


def test_new_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stat.S_IMODE(Path("keys.jsonl").stat().st_mode) == 0o600
    assert new_key(9, "ü\x1b") == 0
    assert new_key(10, "x", "--json", "--verbose") == 0
    captured = capsys.readouterr()
    assert captured.err == "keys.jsonl: license 9 for ü\\x1b\n"
    assert json.loads(captured.out) == {"registry": "keys.jsonl", "license_id": 10, "customer": "x"}
    found = read_registry(Path("keys.jsonl"))
    assert list(found) == [7, 8, 9, 10]
    for entry in found.values():
        assert entry.key.hex() not in captured.out + captured.err


def test_new_key_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("keys.jsonl").read_bytes()
    assert new_key(7, "again") == 1
    assert "license 7 is there already (Acme)" in capsys.readouterr().err
    assert new_key(0, "zero") == 2
    assert new_key(2**32, "large") == 2
    assert Path("keys.jsonl").read_bytes() == before


def test_detect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert detect("acme.bin") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("match: license 7 (Acme), score 0.0000, margin +")
    assert lines[0].endswith("evidence 6.9")
    assert detect("plain.bin") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no match"
    assert lines[1].startswith("nearest: license ")
    assert lines[2] == "score without a rotation 0.0000, with the best one 0.0000"


def test_detect_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert detect("acme.bin", "--json") == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["match"] == {"license_id": 7, "customer": "Acme"}
    assert [s["license_id"] for s in told["scores"]] == [7, 8]
    assert told["scores"][0]["score"] < 1e-6
    assert len(told["scores"][0]["block_scores"]) == 3
    assert told["n_probes"] >= 768
    for entry in read_registry(Path("keys.jsonl")).values():
        assert entry.key.hex() not in captured.out + captured.err


def test_detect_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["fingerprint", "detect", "plain.bin", "--registry", "keys.jsonl", "--reference"]
    assert run([*args, "acme.bin"]) == 1
    assert "the reference has a fingerprint itself" in capsys.readouterr().err
    assert run([*args, "none.bin"]) == 1
    assert "cannot open none.bin" in capsys.readouterr().err
    Path("keys.jsonl").write_text("{}\n")
    assert detect("acme.bin") == 1
    assert "keys.jsonl: line 1: license_id must be 1 to 4294967295" in capsys.readouterr().err


def test_readable_registries_are_warned_about(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("keys.jsonl").chmod(0o644)
    assert detect("plain.bin") == 0
    assert "warning: keys.jsonl holds keys and can be read by others; chmod 600 it" in capsys.readouterr().err
