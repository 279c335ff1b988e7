"""Texts from lines and JSON lines; embeddings to .npy and .jsonl."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.embed.texts import check_unicode, chunks, count_lines, field_of, read_texts
from krafla_cli.embed.vectors import JsonLinesWriter, NpyWriter, documents, vector_writer
from krafla_cli.errors import FormatError, InputError, UsageError


def texts_of(data: bytes, field: str | None = None) -> list[str]:
    return list(read_texts(io.BytesIO(data), "f", field))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\na\n\n", ["", "a", ""]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", ["a", "\ufeffb"]),
        ("x\u2028y\x85\x0bz\rw\n".encode(), ["x\u2028y\x85\x0bz\rw"]),
    ],
)
def test_lines(data: bytes, expected: list[str]) -> None:
    assert texts_of(data) == expected


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(FormatError, match="f: line 2: not UTF-8 at byte 1"):
        texts_of(b"a\nb\xff\n")


def test_json_lines() -> None:
    data = b'{"text": "a\\nb", "id": 1}\n{"id": 2, "text": "\\ud83d\\ude00"}\n\n \n'
    assert texts_of(data, "text") == ["a\nb", "😀"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"text": "a"}\n\n{"text": "b"}', "f: line 2 is empty, JSON lines have an object on each"),
        (b'{"text": "a"}\n{"text": ', "f: line 2: not JSON"),
        (b'["text"]', r'f: line 1: must be a JSON object, is \["text"\]'),
        (b'{"body": "a", "x\\u001b": 1}', r"f: line 1: has no field 'text' \(it has: body, x\\x1b\); --field names"),
        (b'{"text": 5}', "f: line 1: field 'text' must be text, is 5"),
        (b'{"text": null}', "f: line 1: field 'text' must be text, is null"),
        (b"plain text", "f: line 1: not JSON"),
    ],
)
def test_json_lines_that_are_not(data: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        texts_of(data, "text")


def test_half_a_surrogate_pair() -> None:
    with pytest.raises(FormatError, match=r"f: line 1: \\ud800 is half of a surrogate pair, and no character"):
        texts_of(b'{"text": "a\\ud800"}', "text")
    with pytest.raises(InputError, match="text 3: "):
        check_unicode("\udcff", "text 3")


def test_files_named_as_json_lines_are_read_as_such() -> None:
    assert field_of(Path("a.jsonl"), None) == "text"
    assert field_of(Path("a.ndjson"), None) == "text"
    assert field_of(Path("a.txt"), None) is None
    assert field_of(Path("a.jsonl"), "body") == "body"


def test_chunks_and_counts(tmp_path: Path) -> None:
    assert list(chunks(iter("abcde"), 2)) == [["a", "b"], ["c", "d"], ["e"]]
    (tmp_path / "f").write_bytes(b"a\nb\n")
    assert count_lines(tmp_path / "f") == 2
    assert count_lines(Path("-")) == 0


def test_npy_is_numpys(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    for parts in ([], [rows], [rows[:2], rows[2:]]):
        with (tmp_path / "x.npy").open("wb") as f:
            writer = NpyWriter(f, 3)
            for part in parts:
                writer.write([""] * len(part), part)
            writer.finish()
        loaded = np.load(tmp_path / "x.npy", allow_pickle=False)
        assert loaded.dtype == np.float32
        assert np.array_equal(loaded, np.concatenate(parts) if parts else np.empty((0, 3)))


def test_json_lines_hold_the_exact_float32() -> None:
    rows = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    out = io.BytesIO()
    writer = JsonLinesWriter(out, 3)
    writer.write(["a\n", "ü"], rows)
    writer.finish()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["text"] for line in lines] == ["a\n", "ü"]
    assert np.array_equal(np.array([line["embedding"] for line in lines], np.float32), rows)
    assert len(str(documents(["x"], rows[:1])[0]["embedding"][0])) <= 12


def test_the_name_chooses_the_writer() -> None:
    assert vector_writer(Path("a.npy")) is NpyWriter
    assert vector_writer(Path("a.jsonl")) is JsonLinesWriter
    with pytest.raises(UsageError, match=r"a\.bin: embeddings are written as \.npy or \.jsonl"):
        vector_writer(Path("a.bin"))
