"""MLLM model files of both versions: hand-written bytes, and files from strangers."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.errors import FormatError
from krafla_cli.formats.data_types import BY_NAME
from krafla_cli.formats.mllm import MllmWriter, NewTensor, open_mllm, validate


def v1(*tensors: tuple[str, bytes, int], lengthen: int = 0) -> bytes:
    """Name, data, type."""
    n_bytes = sum(24 + len(name.encode()) for name, _, _ in tensors)
    offset, descriptors, body = 12 + n_bytes, b"", b""
    for name, data, kind in tensors:
        descriptors += struct.pack("<i", len(name.encode())) + name.encode()
        descriptors += struct.pack("<QQi", len(data), offset + len(body), kind)
        body += data
    return struct.pack("<iQ", 20012, n_bytes + lengthen) + descriptors + body


def entry(
    i: int, name: str, kind: int, n_bytes: int, offset: int, shape: tuple[int, ...], rank: int | None = None
) -> bytes:
    dims = (*shape, *(0,) * (16 - len(shape)))
    rank = len(shape) if rank is None else rank
    return struct.pack("<IIQQQ16i256s", i, kind, n_bytes, offset, rank, *dims, name.encode())


def v2(*entries: bytes, data: bytes = b"", version: int = 2, count: int | None = None, at: int = 532) -> bytes:
    count = len(entries) if count is None else count
    return struct.pack("<ii512sIQ", 0x519A, version, b"model", count, at) + b"".join(entries) + data


def write(folder: Path, data: bytes) -> Path:
    path = folder / "m.mllm"
    path.write_bytes(data)
    return path


def one_fault(folder: Path, data: bytes) -> str:
    report = validate(write(folder, data))
    assert len(report.faults) == 1, report.faults
    return f"{report.faults[0].status} {report.faults[0]}"


def test_version_1(tmp_path: Path) -> None:
    numbers = np.float32([1, 2.5])
    path = write(tmp_path, v1(("model.norm.weight", numbers.tobytes(), 0), ("w", bytes(18), 2)))
    assert validate(path).valid
    model = open_mllm(path)
    assert (model.version, model.name) == (1, "")
    norm, w = model.tensors.values()
    assert (norm.kind.name, norm.shape, norm.n_weights) == ("F32", None, 2)
    assert (w.kind.name, w.n_bytes, w.n_weights) == ("Q4_0", 18, 32)
    assert model.raw("model.norm.weight").view("<f4").tolist() == [1, 2.5]


def test_version_2(tmp_path: Path) -> None:
    first = 532 + 2 * 352
    data = np.float32([[1, 2, 3]]).tobytes() + bytes(17)
    path = write(
        tmp_path, v2(entry(0, "a", 0, 12, first, (1, 3)), entry(1, "b", 135, 17, first + 12, (32,)), data=data)
    )
    assert validate(path).valid
    model = open_mllm(path)
    assert (model.version, model.name) == (2, "model")
    assert [(t.name, t.kind.name, t.shape) for t in model.tensors.values()] == [
        ("a", "F32", (1, 3)), ("b", "MXFP4", (32,)),
    ]  # fmt: skip
    assert model.raw("a").view("<f4").tolist() == [1, 2, 3]


def test_descriptors_may_come_last(tmp_path: Path) -> None:
    data = bytes(4)
    head = struct.pack("<ii512sIQ", 0x519A, 2, b"", 1, 536)
    path = write(tmp_path, head + data + entry(0, "a", 0, 4, 532, (1,)))
    assert validate(path).valid


def test_writer_against_hand_written_bytes() -> None:
    file = io.BytesIO()
    tensors = [NewTensor("a", BY_NAME["F32"], (1, 3)), NewTensor("bb", BY_NAME["Q8_0"], (2, 32))]
    writer = MllmWriter(file, "model", tensors)
    floats, blocks = np.float32([[1, 2, 3]]), np.arange(68, dtype=np.uint8).reshape(2, 34)
    writer.write("a", floats)
    writer.write("bb", blocks)
    writer.finish()
    first = 1280  # 532 + 2 x 352, on the next multiple of 64
    expected = v2(entry(0, "a", 0, 12, first, (1, 3)), entry(1, "bb", 8, 68, first + 64, (2, 32)))
    expected += bytes(first - len(expected)) + floats.tobytes()
    expected += bytes(first + 64 - len(expected)) + blocks.tobytes()
    assert file.getvalue() == expected


def test_writer_wants_its_order() -> None:
    writer = MllmWriter(io.BytesIO(), "m", [NewTensor("a", BY_NAME["F32"], (1,))])
    with pytest.raises(ValueError, match="b with 4 bytes written where"):
        writer.write("b", np.float32([1]))
    with pytest.raises(ValueError, match="end"):
        writer.write("a", np.float32([1]))
    with pytest.raises(ValueError, match="a was never written"):
        MllmWriter(io.BytesIO(), "m", [NewTensor("a", BY_NAME["F32"], (1,))]).finish()
    with pytest.raises(FormatError, match="has 256 bytes, an MLLM file holds 255"):
        MllmWriter(io.BytesIO(), "m", [NewTensor("n" * 256, BY_NAME["F32"], (1,))])


# ---------------------------------------------------------------------------------------------------------------------
# Hostile and damaged files


def test_headers(tmp_path: Path) -> None:
    assert "the file is empty" in one_fault(tmp_path, b"")
    assert 'must be 20012 (version 1) or 0x519a (version 2), is "abcd"' in one_fault(tmp_path, b"abcd")
    assert "needs 12 bytes, the file has 4" in one_fault(tmp_path, struct.pack("<i", 20012))
    assert "needs 532 bytes, the file has 8" in one_fault(tmp_path, struct.pack("<ii", 0x519A, 2))
    assert one_fault(tmp_path, v2(version=3)) == "ML_E_FORMAT version at offset 4: must be 2, is 3"


@pytest.mark.parametrize("n_bytes", [24, 1 << 40, (1 << 64) - 1])
def test_v1_descriptor_bytes(tmp_path: Path, n_bytes: int) -> None:
    data = struct.pack("<iQ", 20012, n_bytes)
    assert f"descriptor_bytes at offset 4: {n_bytes}, the file has 0" in one_fault(tmp_path, data)


@pytest.mark.parametrize("length", [-1, 2, (1 << 31) - 1])
def test_v1_name_length(tmp_path: Path, length: int) -> None:
    data = bytearray(v1(("a", bytes(4), 0)))
    data[12:16] = struct.pack("<i", length)
    assert f"descriptor 0 at offset 12: name length {length}" in one_fault(tmp_path, bytes(data))


def test_v1_rest_of_descriptors(tmp_path: Path) -> None:
    assert "descriptor 1 at offset 37: name length" in one_fault(tmp_path, v1(("a", bytes(64), 0), lengthen=3))


@pytest.mark.parametrize("count", [2, 1 << 20, (1 << 32) - 1])
def test_v2_count(tmp_path: Path, count: int) -> None:
    fault = one_fault(tmp_path, v2(entry(0, "a", 0, 4, 884, (1,)), data=bytes(4), count=count))
    assert f"{count} descriptors at 532 end at byte {532 + 352 * count}" in fault


def test_v2_descriptor_offset(tmp_path: Path) -> None:
    assert "1 descriptors at 18446744073709551615 end" in one_fault(tmp_path, v2(count=1, at=(1 << 64) - 1))


@pytest.mark.parametrize(
    ("descriptor", "message"),
    [
        (entry(0, "a", 77, 4, 884, (1,)), "a at offset 532: has the unknown data type 77"),
        (entry(0, "", 0, 4, 884, (1,)), "descriptor 0 at offset 532: has no name"),
        (entry(0, "a", 0, 4, 884, (0, 1)), "ML_E_SHAPE a at offset 532: has the shape [0, 1]: a dimension is below 1"),
        (entry(0, "a", 0, 4, 884, (-1, -1)), "a dimension is below 1"),
        (entry(0, "a", 0, 4, 884, (2,)), "ML_E_SHAPE a at offset 532: 4 bytes, F32 [2] needs 8"),
        (entry(0, "a", 2, 18, 884, (33,)), "18 bytes, Q4_0 [33] is no whole blocks of 32 weights"),
        (entry(0, "a", 0, 4, 884, (), rank=17), "has 17 dimensions, at most 16 are allowed"),
        (entry(0, "a", 0, 4, 100, (1,)), "a at offset 100: overlaps the header, which ends at byte 532"),
        (entry(0, "a", 0, 4, 600, (1,)), "a at offset 600: overlaps the descriptors, which ends at byte 884"),
        (entry(0, "a", 0, 4, 904, (1,)), "ends at byte 908, the file has 904; it was cut off"),
        (entry(0, "a", 134, 1 << 62, 884, (1 << 30,) * 2), "1152921504606846976"),
        (entry(0, "a", 16, 4, (1 << 64) - 4, (4,)), "ends at byte 18446744073709551616, the file has 904"),
        (entry(0, "a", 24, 84, 884, ((1 << 31) - 1,) * 16), "is no whole blocks of 256 weights"),
    ],
)  # fmt: skip
def test_v2_descriptors(tmp_path: Path, descriptor: bytes, message: str) -> None:
    assert message in one_fault(tmp_path, v2(descriptor, data=bytes(20)))


def test_v2_names(tmp_path: Path) -> None:
    first = 532 + 2 * 352
    twice = v2(entry(0, "a", 0, 4, first, (1,)), entry(1, "a", 0, 4, first + 4, (1,)), data=bytes(8))
    assert "a at offset 884: occurs twice" in one_fault(tmp_path, twice)
    overlapping = v2(entry(0, "a", 0, 4, first, (1,)), entry(1, "b", 0, 4, first + 2, (1,)), data=bytes(8))
    assert f"b at offset {first + 2}: overlaps a, which ends at byte {first + 4}" in one_fault(tmp_path, overlapping)
    broken = bytearray(v2(entry(0, "a", 0, 4, 884, (1,)), data=bytes(4)))
    broken[532 + 96] = 0xFF
    assert "descriptor 0 at offset 532: its name is not UTF-8" in one_fault(tmp_path, bytes(broken))


def test_types_of_version_2_in_version_1(tmp_path: Path) -> None:
    assert "w at offset 12: is BF16, which only version 2 of the format has" in one_fault(
        tmp_path, v1(("w", bytes(4), 128))
    )


def test_v1_sizes(tmp_path: Path) -> None:
    assert "17 bytes are no whole blocks of 18 (Q4_0)" in one_fault(tmp_path, v1(("w", bytes(17), 2)))
    assert validate(write(tmp_path, v1(("w", bytes(17), 25)))).valid  # Q1_K: nobody knows its size


def test_bytes_cut_off_or_added(tmp_path: Path) -> None:
    for good in (v1(("w", bytes(18), 2)), v2(entry(0, "a", 0, 40, 884, (10,)), data=bytes(40))):
        for n_bytes in range(0, len(good), 7):
            assert not validate(write(tmp_path, good[:n_bytes])).valid
        (warning,) = validate(write(tmp_path, good + bytes(100))).warnings
        assert warning.message == "100 bytes after the last tensor belong to nothing"


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for data, shape in (
        (v1(("w\x1b", bytes(36), 2)), None),
        (v2(entry(0, "w\x1b", 2, 36, 884, (2, 32)), data=bytes(36)), [2, 32]),
    ):
        path = write(tmp_path, data)
        assert run(["inspect", str(path), "--tensors"]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "Q4_0" in out
        assert run(["inspect", str(path), "--tensors", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["tables"]["tensors"]
        assert (row["shape"], row["bytes"]) == (shape, 36)
        assert run(["validate", str(path)]) == 0
        capsys.readouterr()
