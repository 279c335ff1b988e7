"""Corpora of many files: which files, where stretches begin, and what cannot be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krafla_cli.embed import corpus
from krafla_cli.embed.corpus import Unreadable, count_texts, read_stretch, scan, stretches, texts_of
from krafla_cli.errors import FileError, FormatError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_parquet(path: str, values: Any, column: str = "text", rows: int = 1000) -> Path:
    pq.write_table(pa.table({"n": list(range(len(values))), column: values}), path, row_group_size=rows)
    return Path(path)


def read_all(path: Path, step: int, field: str | None = None) -> list[str | Unreadable]:
    """The texts of a file by its stretches, read last to first."""
    source = scan(path.absolute(), str(path), field, step)
    parts = [[text for _, text in read_stretch(s)] for s in reversed(list(stretches(source, step)))]
    return [text for part in reversed(parts) for text in part]


# --- lines


LINES = [b"a", b"", b"b\r", "é".encode(), b"  ", b"last"]


@pytest.mark.parametrize("step", [1, 2, 3, 6, 100])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_stretches_of_lines(step: int, end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_BLOCK_BYTES", 3)
    Path("t.txt").write_bytes(b"\xef\xbb\xbf" + b"\n".join(LINES) + end)
    assert read_all(Path("t.txt"), step) == ["a", "", "b", "é", "  ", "last"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([b'{"text": "x"}', b"", b" \t", b"{}"]), max_size=9), st.booleans(), st.integers(1, 4))
def test_json_lines_by_stretches_are_those_in_one_go(lines: list[bytes], is_ended: bool, step: int) -> None:
    path = Path("t.jsonl")
    path.write_bytes(b"\n".join(lines) + b"\n" * is_ended)
    while lines and not lines[-1].strip():
        lines.pop()
    found = [text if isinstance(text, str) else text.message for text in read_all(path, step)]
    assert len(found) == len(lines)
    for i, (line, text) in enumerate(zip(lines, found, strict=True), 1):
        assert text == "x" if b"x" in line else text.startswith(f"t.jsonl: line {i}: ")


def test_what_is_wrong_with_a_line_is_told_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 40)
    lines = [b'{"body": "a"}', b"\xff", b"[]", b'{"text": 1}', b'{"text": "\\ud800"}', b'{"text": "%b"}' % (b"x" * 99)]
    Path("t.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "good"}', b""]))
    *bad, good = read_all(Path("t.jsonl"), 4)
    assert good == "good"
    words = ("no field 'text' (it has: body)", "not UTF-8", "is []", "must be text, is 1", "no character", "than 40 b")
    for number, (fault, text) in enumerate(zip(bad, words, strict=True), 1):
        assert isinstance(fault, Unreadable)
        assert fault.message.startswith(f"t.jsonl: line {number}: ")
        assert text in fault.message


def test_a_file_that_changes_is_refused() -> None:
    path = Path("t.txt")
    path.write_text("a\nb\n")
    (stretch,) = stretches(scan(path.absolute(), "t.txt", None, 10), 10)
    path.write_text("c\nd\ne\n")
    with pytest.raises(FileError, match=r"t\.txt was changed while the command ran"):
        list(read_stretch(stretch))
    path.unlink()
    with pytest.raises(FileError, match=r"cannot read t\.txt: No such file"):
        list(read_stretch(stretch))


def test_pipes_and_missing_files_are_no_corpus() -> None:
    os.mkfifo("p")
    for name, words in (("p", "p is no regular file"), ("none", "cannot read none: No such file"), (".", "no regular")):
        with pytest.raises(FileError, match=words):
            scan(Path(name).absolute(), name, None, 1)


# --- Parquet


@pytest.mark.parametrize("step", [1, 3, 4, 7, 50])
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_stretches_of_parquet(step: int, kind: Any) -> None:
    texts = [f"text {i % 6}" for i in range(23)]
    path = write_parquet("t.parquet", pa.array(texts, pa.string()).cast(kind), rows=5)
    assert read_all(path, step) == texts
    assert list(texts_of([path], None)) == texts
    assert count_texts([path], None) == 23


def test_rows_that_cannot_be_read() -> None:
    raw = pa.array([b"a", b"\xff", b"b"], pa.binary())
    not_text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    path = write_parquet("t.parquet", pa.chunked_array([not_text, pa.array(["c", None])]), "body")
    found = read_all(path, 2, "body")
    assert [t for t in found if isinstance(t, str)] == ["a", "b", "c"]
    assert found[1] == Unreadable("t.parquet: row 2: not UTF-8 at byte 0")
    assert found[4] == Unreadable("t.parquet: row 5: field 'body' is null")
    with pytest.raises(FormatError, match="row 2: not UTF-8"):
        list(texts_of([path], "body"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 2], r"column 'text' is no text but int64"),
        (None, r"has no column 'text' \(it has: n, body\); --field names another"),
        (b"PAR1 and nothing", "no Parquet file: "),
        (b"", "no Parquet file: "),
    ],
)
def test_files_that_cannot_be_read(values: Any, words: str) -> None:
    if isinstance(values, bytes):
        Path("t.parquet").write_bytes(values)
    else:
        write_parquet("t.parquet", values or ["a"], "text" if values else "body")
    source = scan(Path("t.parquet").absolute(), "t.parquet", None, 10)
    assert source.n_texts == 0
    with pytest.raises(FormatError, match=r"^t\.parquet: " + words):
        raise FormatError(source.fault or "")


def test_a_damaged_page_loses_the_rows_from_there_on() -> None:
    path = write_parquet("t.parquet", [f"{i:08d}" * 40 for i in range(3000)], rows=1000)
    data = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(1).column(1)
    start = group.dictionary_page_offset or group.data_page_offset
    data[start : start + 200] = bytes([255] * 200)
    path.write_bytes(data)
    found = read_all(path, 1000)
    assert [isinstance(t, str) for t in (found[0], found[999], found[1001])] == [True, True, True]
    (fault,) = [t for t in found if isinstance(t, Unreadable)]
    assert fault.n_texts == 1000
    assert fault.message.startswith("t.parquet: rows 1001 to 2000: ")
    assert "\n" not in fault.message


def test_a_page_that_is_not_what_its_checksum_says() -> None:
    texts = [f"{i:08d}" for i in range(100)]
    pq.write_table(pa.table({"text": texts}), "t.parquet", compression="none", write_page_checksum=True)
    data = Path("t.parquet").read_bytes()
    Path("t.parquet").write_bytes(data.replace(b"00000050", b"00000O50", 1))
    (fault,) = read_all(Path("t.parquet"), 100)
    assert isinstance(fault, Unreadable)
    assert fault.n_texts == 100
