"""The license registry: mode 600, keys never shown, bad lines named by number."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from krafla_cli.embed.registry import add_license, key_of_license, read_key_file, read_registry
from krafla_cli.errors import DataError, FileError, FormatError, InputError
from krafla_cli.progress import Progress

HEX = "0f" * 32


class Warnings(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


def entry(**changes: Any) -> str:
    return json.dumps({"license_id": 2, "customer": "c", "key": HEX, **changes})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_licenses_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    first = add_license(path, 7, 'Acme\n"x" ü')
    second = add_license(path, 0xFFFFFFFF, "Other")
    assert mode(path) == 0o600
    found = read_registry(path)
    assert found == {7: first, 0xFFFFFFFF: second}
    assert first.key != second.key
    assert len(first.key) == 32
    assert len(path.read_bytes().splitlines()) == 2
    assert key_of_license(path, 7) == first.key


def test_keys_are_not_in_what_python_prints(tmp_path: Path) -> None:
    added = add_license(tmp_path / "keys.jsonl", 7, "Acme")
    assert added.key.hex() not in repr(added)
    assert repr(added.key) not in repr(added)


def test_a_license_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    add_license(path, 7, "Ac\x1bme")
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"license 7 is there already \(Ac\\x1bme\)"):
        add_license(path, 7, "Other")
    assert path.read_bytes() == before


@pytest.mark.parametrize("license_id", [0, -1, 2**32])
def test_license_ids_fit_the_header(tmp_path: Path, license_id: int) -> None:
    with pytest.raises(DataError, match="must be 1 to 4294967295"):
        add_license(tmp_path / "keys.jsonl", license_id, "x")
    assert not (tmp_path / "keys.jsonl").exists()


def test_a_customer_that_is_no_text_does_not_spoil_the_registry(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    with pytest.raises(InputError, match=r"customer: .* at character 1 is no character"):
        add_license(path, 1, "x\udcff")  # what Python makes of a byte of a command line that is not UTF-8
    add_license(path, 2, "y")
    assert list(read_registry(path)) == [2]


def test_a_loose_mode_is_tightened_or_warned_about(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text("")
    path.chmod(0o644)
    warnings = Warnings()
    read_registry(path, warnings)
    assert "can be read by others" in warnings.texts[0]
    add_license(path, 1, "x")
    assert mode(path) == 0o600
    warnings = Warnings()
    read_registry(path, warnings)
    assert not warnings.texts


def test_a_missing_last_line_feed_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text(entry(license_id=3))
    add_license(path, 4, "d")
    assert set(read_registry(path)) == {3, 4}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: must be an object"),
        (entry(license_id=True), "line 2: license_id must be 1 to"),
        (entry(license_id=0), "line 2: license_id must be 1 to"),
        (entry(customer=None), "line 2: customer must be text"),
        (entry(key=HEX[1:]), "line 2: the key must be 64 hexadecimal digits"),
        (entry(key=HEX[2:] + "x0"), "line 2: the key must be 64 hexadecimal digits"),
        (entry(key=5), "line 2: the key must be 64 hexadecimal digits"),
        (entry(license_id=1), "line 2: license 1 occurs twice"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text(entry(license_id=1) + "\n" + line + "\n")
    path.chmod(0o600)
    before = path.read_bytes()
    for use in (lambda: read_registry(path), lambda: add_license(path, 9, "x"), lambda: key_of_license(path, 1)):
        with pytest.raises(FormatError, match=words) as caught:
            use()
        assert "0f0f" not in str(caught.value)
    assert path.read_bytes() == before


def test_an_unknown_license_says_how_to_make_one(tmp_path: Path) -> None:
    add_license(tmp_path / "keys.jsonl", 1, "x")
    with pytest.raises(DataError, match="has no license 2; `mlb fingerprint new-key` makes"):
        key_of_license(tmp_path / "keys.jsonl", 2)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "keys.jsonl"):
        with pytest.raises(FileError, match="cannot write"):
            add_license(path, 1, "x")
        with pytest.raises(FileError, match="cannot open"):
            read_registry(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_is_left_alone() -> None:
    before = Path("/dev/full").stat().st_mode
    with pytest.raises(FileError, match="not a regular file"):
        add_license(Path("/dev/full"), 1, "x")
    assert Path("/dev/full").stat().st_mode == before


def test_a_failed_write_leaves_the_registry_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.jsonl"
    add_license(path, 1, "x")
    before = path.read_bytes()
    real_write = os.write
    calls = iter(
        [lambda fd, data: real_write(fd, data[:5]), lambda fd, data: (_ for _ in ()).throw(OSError(28, "full"))]
    )
    monkeypatch.setattr("krafla_cli.embed.registry.os.write", lambda fd, data: next(calls)(fd, data))
    with pytest.raises(FileError, match="full"):
        add_license(path, 2, "y")
    assert path.read_bytes() == before


def _add_ten(path: Path, start: int) -> None:
    for license_id in range(start, start + 10):
        add_license(path, license_id, "c")


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_ten, args=(path, start)) for start in (1, 11)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(read_registry(path)) == set(range(1, 21))


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"  {HEX.upper()}\n")
    path.chmod(0o600)
    assert read_key_file(path) == bytes.fromhex(HEX)
    for text in (HEX[:-1], HEX + "0", "", "ğ" * 64, HEX[:-2] + " 0"):
        path.write_text(text)
        with pytest.raises(FormatError, match="the key must be 64 hexadecimal digits"):
            read_key_file(path)
    with pytest.raises(FileError, match="cannot open"):
        read_key_file(tmp_path / "none")
