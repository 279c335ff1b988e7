"""JSON from strangers: pipes, sizes, depth, duplicate keys, half surrogates; values as people know them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from krafla_cli.errors import FileError, FormatError
from krafla_cli.formats.json_file import MAX_DEPTH, parse_json, read_json, read_json_object, shown_json


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x: not JSON: Expecting value at line 1, column 1"),
        (b"\xff", "x: not UTF-8 at byte 0"),
        (b'{"a": 1, "a": 2}', 'x: key "a" occurs twice'),
        (b"[" * 200 + b"]" * 200, f"x: JSON nested 200 deep, at most {MAX_DEPTH} are read"),
        (b"[" * 500_000, f"x: JSON nested 500000 deep, at most {MAX_DEPTH} are read"),
        (b"[" + b"[]," * 2_000_000 + b"[]]", "x: 6000004 bytes of JSON that would take some 128000112 bytes of memory"),
        (b'"\\ud800"', "x: \\ud800 is half of a surrogate pair, and no character"),
        (b'"\\uDC00\\ud83d\\ude00"', "x: \\uDC00 is half of a surrogate pair, and no character"),
        (b"9" * 5000, "x: not usable JSON: "),
    ],
)
def test_refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as raised:
        parse_json(data, "x")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'\xef\xbb\xbf{"a": null}', {"a": None}),
        (b'"\\ud83d\\ude00 \\\\ud800 \\\\\\\\ud800"', "😀 \\ud800 \\\\ud800"),
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, None),
        (b'"' + b"[{" * 500 + b'\\"' + b"[" * 500 + b'"', None),
        (b"[" + b'"]",' * 200 + b"0]", None),
    ],
)
def test_read(data: bytes, value: Any) -> None:
    assert value in (parse_json(data, "x"), None)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"[1]" + b" " * 100)
    with pytest.raises(FormatError, match=r"x.json: 103 bytes, at most 102 are read"):
        read_json(path, 102)
    with pytest.raises(FormatError, match=r"x.json: must hold a JSON object, holds \[1\]"):
        read_json_object(path)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(FileError, match="it is no regular file"):
        read_json(tmp_path / "pipe.json")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ("a\x1b", '"a\\x1b"'),
        ([1, None, [2]], "[1, null, [...]]"),
        ([0] * 9, "[0, 0, 0, 0, 0, ...]"),
        ({}, "an empty object"),
        ({"a": 1}, "an object"),
        (10**99, "a number of over 70 digits"),
    ],
)
def test_values_in_messages(value: object, text: str) -> None:
    assert shown_json(value) == text
