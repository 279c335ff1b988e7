"""Indexes from strangers: every field of the manifest, every length, and texts that are not where they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krafla_cli.errors import FileError, FormatError, MlbError
from krafla_cli.formats.index_folder import (
    Manifest,
    is_index,
    open_index,
    parse_manifest,
    read_manifest,
    text_line,
    validate,
)
from krafla_cli.report.inspect import describe, render
from krafla_cli.report.validate import expand
from krafla_cli.report.validate import validate as validate_any

GOOD = Manifest(1, "test", "1.2.0", 4, 0, False, "ab" * 32, "../m.bin", "int8", 2)


def write(folder: Path, **changes: Any) -> Path:
    """An index of two rows; ``changes`` replace fields of its manifest."""
    folder.mkdir(exist_ok=True)
    lines = [text_line("one"), text_line("two")]
    np.save(folder / "vectors.npy", np.arange(8, dtype=np.int8).reshape(2, 4))
    np.save(folder / "scales.npy", np.ones(2, np.float32))
    np.save(folder / "offsets.npy", np.cumsum([0, *map(len, lines)]))
    (folder / "texts.jsonl").write_bytes(b"".join(lines))
    (folder / "manifest.json").write_text(json.dumps({**vars(GOOD), **changes}))
    return folder


def fault_of(folder: Path) -> str:
    """What opening and validating say; they agree."""
    report = validate(folder)
    assert not report.valid
    with pytest.raises(MlbError) as caught:
        open_index(folder)
    assert str(report.faults[0]).split(": ", 1)[1].split(": ")[-1] in str(caught.value)
    return str(caught.value)


def test_a_good_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "ix", later_versions_say="more")
    index = open_index(folder)
    assert index.manifest == GOOD
    assert [index.text(0), index.text(1)] == ["one", "two"]
    assert validate(folder).valid
    assert validate_any(folder).kind == "index"
    assert list(expand((tmp_path,))) == [folder]
    assert list(expand((folder,))) == [folder]
    lines = render(describe(folder))
    assert "search index" in lines[0]
    assert any(line.split() == ["dims", "4"] for line in lines)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("index_version", 2, "index_version is 2, this tool reads 1"),
        ("index_version", True, "index_version is true, this tool reads 1"),
        ("index_version", "1", 'index_version is "1", this tool reads 1'),
        ("model_id", 5, "model_id is 5, must be at most 16 bytes of text"),
        ("model_id", "é" * 9, "must be at most 16 bytes"),
        ("model_version", "1.2", 'model_version is "1.2", must be like "1.2.0"'),
        ("model_version", "1.2.0\n", "must be like"),
        ("dims", 0, "dims is 0, must be 1 to 65535"),
        ("dims", 4.0, "dims is 4.0, must be"),
        ("dims", 1 << 70, "must be 1 to 65535"),
        ("license_id", -1, "license_id is -1, must be"),
        ("has_fingerprint", 0, "has_fingerprint is 0, must be true or false"),
        ("model_sha256", "AB" * 32, "must be 64 hexadecimal digits"),
        ("model", None, "model is null, must be a path"),
        ("dtype", "float16", "must be float32 or int8"),
        ("dtype", ["int8"], "must be float32 or int8"),
        ("count", 0, "count is 0, must be at least 1"),
        ("count", -3, "count is -3"),
        ("count", 1 << 60, "must be at least 1"),
        ("count", 3, r"vectors.npy: holds |i1 [2, 4], must hold |i1 [3, 4]"),
        ("dims", 5, r"vectors.npy: holds |i1 [2, 4], must hold |i1 [2, 5]"),
        ("dtype", "float32", r"vectors.npy: holds |i1 [2, 4], must hold <f4 [2, 4]"),
    ],
)
def test_hostile_manifests(tmp_path: Path, field: str, value: Any, words: str) -> None:
    assert words in fault_of(write(tmp_path / "ix", **{field: value}))


@pytest.mark.parametrize("field", list(vars(GOOD)))
def test_missing_fields(field: str) -> None:
    document = {name: value for name, value in vars(GOOD).items() if name != field}
    with pytest.raises(FormatError, match=f"m: {field} is missing"):
        parse_manifest(document, "m")


def test_the_version_comes_first() -> None:
    """Of an index of another version nothing else is said: its fields may mean something else."""
    with pytest.raises(FormatError, match="m: index_version is 9"):
        parse_manifest({"dims": "many", "index_version": 9}, "m")


def test_control_characters_are_not_printed(tmp_path: Path) -> None:
    assert "\x1b" not in fault_of(write(tmp_path / "ix", dtype="\x1b[31m"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"dims": 1, "dims": 2}', "[" * 100000, "\xff"])
def test_manifests_that_are_no_object(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "ix")
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=r"manifest\.json"):
        open_index(folder)
    assert not validate(folder).valid


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    assert not is_index(tmp_path)
    with pytest.raises(FileError, match=r"is no index, it has no manifest\.json; `mlb index build` makes one"):
        read_manifest(tmp_path)
    with pytest.raises(FileError, match="cannot open"):
        read_manifest(tmp_path / "none")


@pytest.mark.parametrize("name", ["vectors.npy", "scales.npy", "offsets.npy", "texts.jsonl"])
def test_missing_and_cut_files(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "ix")
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    assert not validate(folder).valid
    (folder / name).unlink()
    if name != "vectors.npy":
        assert f"{name}: No such file" in fault_of(folder)


@pytest.mark.parametrize("offsets", [[0, 16, 99], [0, -5, 32], [0, 20, 10], [0, 0, 32], [5, 16, 32], [0, 12, 32]])
def test_offsets_that_lie(tmp_path: Path, offsets: list[int]) -> None:
    folder = write(tmp_path / "ix")
    np.save(folder / "offsets.npy", np.array(offsets))
    index = open_index(folder)
    with pytest.raises(FormatError, match=r"texts.jsonl: line \d"):
        for row in range(2):
            index.text(row)
    assert not validate(folder).valid


@pytest.mark.parametrize("line", [b'{"texx": "one"}\n', b'["one    ......"\n', b'{"text": 123456}\n'])
def test_lines_without_a_text(tmp_path: Path, line: bytes) -> None:
    folder = write(tmp_path / "ix")
    (folder / "texts.jsonl").write_bytes(line[: len(text_line("one"))].ljust(16) + text_line("two"))
    assert not validate(folder).valid


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    folder = write(tmp_path / "ix", dtype="float32")
    vectors = np.ones((2, 4), np.float32)
    vectors[1, 2] = np.nan
    np.save(folder / "vectors.npy", vectors)
    assert str(validate(folder).faults[0]) == "vectors.npy: row 1 is not finite"
