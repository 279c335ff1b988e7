"""The .mlt format: golden bytes, every rule broken once, hostile lengths, cut and lengthened files."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krafla_cli.errors import FileError, FormatError
from krafla_cli.formats import mlt
from krafla_cli.formats.mlt import Flag, Kind, Mlt, Token

# Kind 2: "a", "b", "ab", a hole, the added token "<s>"; one merge; BOS 4; flags 1 + 2.
GOLDEN = bytes.fromhex(
    "4d4c5431 01000000 02000000 05000000 01000000 04000000 ffffffff 03000000"
    "00 01000000 61"
    "00 01000000 62"
    "00 02000000 6162"
    "00 00000000"
    "01 03000000 3c733e"
    "00000000 01000000 02000000"
)
TOKENS = (Token(0, b"a"), Token(0, b"b"), Token(0, b"ab"), Token(0, b""), Token(1, b"<s>"))
MERGES = np.array([[0, 1, 2]], np.uint32)
HEADER = "<4sIIIIiiI"
FIRST_TOKEN, FIRST_MERGE = 32, 32 + 5 * 5 + 7


def packed(
    tokens: list[tuple[int, bytes]],
    merges: list[tuple[int, int, int]] = [],  # noqa: B006
    kind: int = 2,
    bos: int = -1,
    eos: int = -1,
    flags: int = 0,
) -> bytes:
    """The bytes of a file, valid or not."""
    head = struct.pack(HEADER, b"MLT1", 1, kind, len(tokens), len(merges), bos, eos, flags)
    body = b"".join(struct.pack("<BI", attr, len(data)) + data for attr, data in tokens)
    return head + body + b"".join(struct.pack("<3I", *m) for m in merges)


@pytest.fixture
def file(tmp_path: Path):
    def write(data: bytes) -> Path:
        path = tmp_path / "t.mlt"
        path.write_bytes(data)
        return path

    return write


def test_golden_bytes_are_read(file) -> None:
    got = mlt.read(file(GOLDEN))
    assert (got.kind, got.flags) == (Kind.BYTE_LEVEL, Flag.ADD_BOS | Flag.IGNORE_MERGES)
    assert (got.bos, got.eos, got.tokens) == (4, -1, TOKENS)
    assert got.merges.tolist() == [[0, 1, 2]]
    assert got.added() == {4: "<s>"}


def test_golden_bytes_are_written() -> None:
    assert mlt.to_bytes(Mlt(Kind.BYTE_LEVEL, Flag(3), 4, -1, TOKENS, MERGES)) == GOLDEN


def test_a_good_file_has_no_faults(file) -> None:
    data = packed([(0, bytes([b])) for b in range(256)] + [(0, b"ab")], [(97, 98, 256)])
    report = mlt.validate(file(data))
    assert (report.valid, report.faults, report.warnings, report.status) == (True, [], [], "ML_OK")


@pytest.mark.parametrize(
    ("offset", "value", "where", "message"),
    [
        (0, b"MLB1", "magic", 'must be "MLT1", is "MLB1"'),
        (4, struct.pack("<I", 2), "version", "must be 1, is 2"),
        (8, struct.pack("<I", 3), "kind", "must be 1 or 2, is 3"),
        (12, struct.pack("<I", 0), "n_vocab", "must be between 1 and 16777216, is 0"),
        (12, struct.pack("<I", 2**32 - 1), "n_vocab", "must be between 1 and 16777216, is 4294967295"),
        (12, struct.pack("<I", 2**24), "n_vocab", "16777216 tokens need at least 83886080 bytes, the file has 44"),
        (16, struct.pack("<I", 2), "n_merges", "2 merges need 24 bytes, the file has 12 left"),
        (
            16,
            struct.pack("<I", 2**32 - 1),
            "n_merges",
            "4294967295 merges need 51539607540 bytes, the file has 12 left",
        ),
        (16, struct.pack("<I", 0), "end of file", "12 bytes follow the last merge"),
        (20, struct.pack("<i", 5), "bos", "must be -1 or a token id below n_vocab, is 5"),
        (20, struct.pack("<i", -2), "bos", "must be -1 or a token id below n_vocab, is -2"),
        (20, struct.pack("<i", -1), "bos", "must be set with flag 1, is -1"),
        (24, struct.pack("<i", 5), "eos", "must be -1 or a token id below n_vocab, is 5"),
        (28, struct.pack("<I", 128 + 1), "flags", "bits above 64 are 0, is 129"),
        (FIRST_TOKEN, b"\x04", "token 0", "attr must be 0, 1 (added) or 2 (byte), is 4"),
        (FIRST_TOKEN, b"\x03", "token 0", "attr must be 0, 1 (added) or 2 (byte), is 3"),
        (FIRST_TOKEN, b"\x02", "token 0", "attr 2 (byte fallback) belongs to kind 1, kind is 2"),
        (FIRST_TOKEN + 1, b"\xff\xff\xff\xff", "token 0", "length 4294967295, the file has 39 bytes left"),
        (FIRST_MERGE, struct.pack("<I", 5), "merge 0", "(5, 1, 2): ids must be below n_vocab, is 5"),
        (FIRST_MERGE, struct.pack("<I", 1), "merge 0", "(1, 1, 2): token 2 must hold the bytes of 1, then 1"),
    ],
)
def test_each_broken_rule_is_named(file, offset: int, value: bytes, where: str, message: str) -> None:
    data = GOLDEN[:offset] + value + GOLDEN[offset + len(value) :]
    report = mlt.validate(file(data))
    fault = report.faults[0]
    assert (fault.status, fault.where, fault.message) == ("ML_E_FORMAT", where, message)
    with pytest.raises(FormatError, match=r"t\.mlt: "):
        mlt.read(file(data))


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        ([(1, b"")], 2, "an added token needs text, has length 0"),
        ([(1, b"\xff")], 2, r"must be UTF-8, is \xff"),
        ([(0, b"\xc3")], 1, r"must be UTF-8, is \xc3"),
        ([(2, b"ab")], 1, "a byte token holds one byte, has 2"),
        ([(2, b"")], 1, "a byte token holds one byte, has 0"),
    ],
)
def test_faults_of_tokens(file, tokens: list[tuple[int, bytes]], kind: int, message: str) -> None:
    report = mlt.validate(file(packed(tokens, kind=kind)))
    assert [f.message for f in report.faults] == [message]
    assert report.faults[0].offset == 32


def test_byte_level_pieces_need_not_be_utf8(file) -> None:
    assert mlt.validate(file(packed([(0, b"\xff\xfe")]))).valid


def test_all_faults_are_listed(file) -> None:
    data = packed([(9, b"a"), (1, b""), (0, b"c")], [(0, 7, 1), (0, 2, 1)], kind=5, bos=77, eos=78, flags=256)
    wheres = [f.where for f in mlt.validate(file(data)).faults]
    assert wheres == ["kind", "bos", "eos", "flags", "token 0", "token 1", "merge 0", "merge 1"]
    with pytest.raises(
        FormatError, match=r"kind at offset 8: must be 1 or 2, is 5 \(7 more: `mlb validate` lists them\)"
    ):
        mlt.read(file(data))


def test_warnings_do_not_make_a_file_invalid(file) -> None:
    tokens = [(0, b"a"), (0, b"a"), (0, b"")]
    report = mlt.validate(file(packed(tokens, [(0, 0, 2)] * 0, kind=2, bos=2, flags=4 | 16 | 32)))
    assert report.valid
    assert [(w.where, w.message) for w in report.warnings] == [
        ("flags", "20 has no meaning here and is ignored"),
        ("token 1", "repeats token 0; text is never encoded to it"),
        ("tokens", "no token for 242 bytes (0x00, 0x01, 0x02, 0x03, ...): text that holds them cannot be encoded"),
        ("bos", "token 2 is a hole"),
    ]
    repeated = packed([(0, b"a"), (0, b"b"), (0, b"ab")], [(0, 1, 2), (0, 1, 2)])
    assert "1 pairs are repeated; the first rank counts" in [w.message for w in mlt.validate(file(repeated)).warnings]


@pytest.mark.parametrize("n_bytes", range(len(GOLDEN)))
def test_a_cut_file_is_invalid(file, n_bytes: int) -> None:
    report = mlt.validate(file(GOLDEN[:n_bytes]))
    assert not report.valid
    if n_bytes < 32:
        expected = "is empty" if n_bytes == 0 else f"has {n_bytes} bytes, the header needs 32"
        assert report.faults[0].message == expected


def test_a_missing_file(tmp_path: Path) -> None:
    for action in (mlt.read, mlt.validate):
        with pytest.raises(FileError, match=r"cannot open .*none\.mlt: No such file or directory"):
            action(tmp_path / "none.mlt")


def test_nothing_is_allocated_for_what_the_file_does_not_hold(file) -> None:
    path = file(struct.pack(HEADER, b"MLT1", 1, 2, 2**24, 2**32 - 1, -1, -1, 0) + b"\0" * 64)
    tracemalloc.start()
    try:
        assert not mlt.validate(path).valid
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_writing_refuses_what_reading_would(file) -> None:
    with pytest.raises(FormatError, match=r"merge 0 at offset .*: token 2 must hold the bytes of 1, then 0"):
        mlt.to_bytes(Mlt(Kind.BYTE_LEVEL, Flag(0), -1, -1, TOKENS, np.array([[1, 0, 2]], np.uint32)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_files_are_reported_and_never_crash(tmp_path_factory, changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOLDEN)
    for at, value in changes:
        data[at] = value
    path = tmp_path_factory.getbasetemp() / "damaged.mlt"
    path.write_bytes(data)
    report = mlt.validate(path)
    if report.valid:
        assert mlt.to_bytes(mlt.read(path)) == bytes(data)
    else:
        with pytest.raises(FormatError):
            mlt.read(path)
