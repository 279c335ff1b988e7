"""GGUF files: hand-written bytes, the gguf package's writer, and files from strangers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf as package
import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.errors import FileError, FormatError, ShapeError
from krafla_cli.formats.gguf import open_gguf, validate
from tests.helpers.gguf_bytes import ARCHITECTURE, description, gguf, pair, text, value


def write(folder: Path, data: bytes) -> Path:
    path = folder / "m.gguf"
    path.write_bytes(data)
    return path


def one_fault(folder: Path, data: bytes) -> str:
    report = validate(write(folder, data))
    assert len(report.faults) == 1, report.faults
    return f"{report.faults[0].status} {report.faults[0]}"


ONE_TENSOR = description("a.weight", (32, 2), 2, 0)


def test_hand_written_file(tmp_path: Path) -> None:
    pairs = [
        ARCHITECTURE,
        pair("u8", 0, 255), pair("i8", 1, -1), pair("u16", 2, 65535), pair("i16", 3, -2), pair("u32", 4, 7),
        pair("i32", 5, -7), pair("f32", 6, 0.5), pair("yes", 7, True), pair("u64", 10, 1 << 60),
        pair("i64", 11, -5), pair("f64", 12, 0.1), pair("words", 9, (8, ["a", "", "þ"])),
        pair("numbers", 9, (5, [1, -2])), pair("flags", 9, (7, [True, False])),
    ]  # fmt: skip
    data = bytes(range(36))
    tensors = [ONE_TENSOR, description("b", (3,), 0, 64)]
    model = open_gguf(write(tmp_path, gguf(pairs, tensors, data + bytes(28) + struct.pack("<3f", 1, 2, 3))))
    values = {k: v.value for k, v in model.metadata.items()}
    assert values["general.architecture"] == "llama"
    assert [values[k] for k in ("u8", "i8", "u16", "i16", "u32", "i32", "f32")] == [255, -1, 65535, -2, 7, -7, 0.5]
    assert values["yes"] is True
    assert (values["u64"], values["i64"], values["f64"]) == (1 << 60, -5, 0.1)
    assert values["words"] == ["a", "", "þ"]
    assert values["numbers"].tolist() == [1, -2]
    assert values["flags"].tolist() == [True, False]
    assert model.metadata["numbers"].type_name == "array of int32"
    a, b = model.tensors.values()
    assert (a.name, a.kind.name, a.shape, a.n_bytes) == ("a.weight", "Q4_0", (2, 32), 36)
    assert bytes(model.raw("a.weight")) == data
    assert model.raw("b").view("<f4").tolist() == [1, 2, 3]
    assert b.shape == (3,)


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    pairs = [ARCHITECTURE, pair("general.alignment", 4, 64)]
    data = gguf(pairs, [description("b", (1,), 0, 64)], bytes(64) + struct.pack("<f", 2.5), version=2, alignment=64)
    model = open_gguf(write(tmp_path, data))
    assert model.raw("b").view("<f4")[0] == 2.5


def test_files_of_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((8, 64)).astype(np.float32)
    blocks = package.quantize(weights, package.GGMLQuantizationType.Q5_0)
    writer = package.GGUFWriter(path, "qwen3")
    writer.add_context_length(77)
    writer.add_token_list(["a", "ß"])
    writer.add_tensor("w", weights)
    writer.add_tensor("q", blocks, raw_dtype=package.GGMLQuantizationType.Q5_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = open_gguf(path)
    assert validate(path).valid
    assert not validate(path).warnings
    assert model.require("qwen3.context_length", int) == 77
    assert model.require("tokenizer.ggml.tokens", list) == ["a", "ß"]
    np.testing.assert_array_equal(model.raw("w").view("<f4").reshape(8, 64), weights)
    assert bytes(model.raw("q")) == blocks.tobytes()
    assert model.tensors["q"].shape == (8, 64)


def test_typed_access(tmp_path: Path) -> None:
    model = open_gguf(write(tmp_path, gguf([ARCHITECTURE, pair("n", 4, 3), pair("t", 7, True)])))
    assert model.require("n", float) == 3.0
    assert model.get("absent", int) is None
    with pytest.raises(FormatError, match=r"m.gguf: n at offset 69 is of type uint32, must be a string"):
        model.require("n", str)
    with pytest.raises(FormatError, match=r"t at offset .* is of type bool, must be an integer"):
        model.get("t", int)
    with pytest.raises(FormatError, match="metadata absent is missing"):
        model.require("absent", int)


# ---------------------------------------------------------------------------------------------------------------------
# Hostile and damaged files: one line each, and never more memory than the file has bytes


def test_headers(tmp_path: Path) -> None:
    assert one_fault(tmp_path, b"") == "ML_E_FORMAT header at offset 0: needs 24 bytes, the file is empty"
    assert (
        one_fault(tmp_path, b"GGUF\3\0\0\0") == "ML_E_FORMAT header at offset 0: needs 24 bytes, the file has 8 bytes"
    )
    assert 'must be "GGUF", is "GGML"' in one_fault(tmp_path, b"GGML" + gguf()[4:])
    big = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    assert "is 3 in big-endian order; big-endian GGUF is not supported" in one_fault(tmp_path, big)
    assert "is 1, which only the first weeks of GGUF wrote" in one_fault(tmp_path, gguf(version=1))
    assert one_fault(tmp_path, gguf(version=4)) == "ML_E_FORMAT version at offset 4: must be 2 or 3, is 4"
    with pytest.raises(FileError, match="No such file"):
        open_gguf(tmp_path / "none.gguf")


@pytest.mark.parametrize("count", [1000, 1 << 62, (1 << 64) - 1])
def test_counts_are_checked_before_they_are_used(tmp_path: Path, count: int) -> None:
    fault = one_fault(tmp_path, gguf(n_tensors=count))
    assert fault.startswith(f"ML_E_FORMAT tensor_count at offset 8: {count} entries need at least {24 * count} bytes")
    fault = one_fault(tmp_path, gguf(n_pairs=count))
    assert fault.startswith(f"ML_E_FORMAT metadata_kv_count at offset 16: {count} entries need at least")


@pytest.mark.parametrize("length", [200, 1 << 62, (1 << 64) - 1])
def test_lengths_are_checked_before_they_are_used(tmp_path: Path, length: int) -> None:
    def lengthened(data: bytes) -> bytes:
        return struct.pack("<Q", length) + data[8:]

    fault = one_fault(tmp_path, gguf([lengthened(ARCHITECTURE)]))
    assert fault.startswith(f"ML_E_FORMAT key 0 at offset 32: needs {length} bytes, the file has")
    fault = one_fault(tmp_path, gguf([ARCHITECTURE, text("k") + struct.pack("<IQ", 8, length)]))
    assert f"k at offset 90: needs {length} bytes" in fault
    numbers = text("k") + struct.pack("<IIQ", 9, 4, length)
    assert f"k at offset 94: needs {4 * length} bytes" in one_fault(tmp_path, gguf([ARCHITECTURE, numbers]))
    words = text("k") + struct.pack("<IIQ", 9, 8, length)
    assert f"k at offset 94: {length} entries need" in one_fault(tmp_path, gguf([ARCHITECTURE, words]))
    word = text("k") + struct.pack("<IIQQ", 9, 8, 1, length)
    assert f"k[0] at offset 94: needs {length} bytes" in one_fault(tmp_path, gguf([ARCHITECTURE, word]))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([ARCHITECTURE, ARCHITECTURE], "general.architecture at offset 69: occurs twice"),
        ([], "general.architecture: is missing; without it no tensor has a meaning"),
        ([pair("general.architecture", 4, 1)], "general.architecture: must be a string, is uint32"),
        ([ARCHITECTURE, text("k") + struct.pack("<I", 77)], "has the unknown type 77"),
        ([ARCHITECTURE, text("k") + struct.pack("<IIQ", 9, 9, 0)], "arrays inside arrays are not supported"),
        ([ARCHITECTURE, text("k") + struct.pack("<IIQ", 9, 13, 0)], "has the unknown type 13"),
        ([ARCHITECTURE, text(b"\xff") + value(4, 0)], "key 1 at offset 77: is not UTF-8 at its byte 0"),
        ([ARCHITECTURE, pair("general.alignment", 4, 12)], "must be a power of two of at least 8, is 12"),
        ([ARCHITECTURE, pair("general.alignment", 4, 0)], "must be a power of two of at least 8, is 0"),
    ],
)
def test_metadata(tmp_path: Path, pairs: list[bytes], message: str) -> None:
    assert message in one_fault(tmp_path, gguf(pairs))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([description("a", (33,), 2, 0)], "a at offset 69: rows of 33 weights are no whole blocks of 32 (Q4_0)"),
        ([description("a", (0, 2), 0, 0)], "ML_E_SHAPE a at offset 69: has the shape [2, 0]: a dimension is 0"),
        ([description("a", (1,) * 5, 0, 0)], "has 5 dimensions, at most 4 are allowed"),
        ([description("a", (1,), 250, 0)], "has the unknown data type 250"),
        ([description("a", (32,), 36, 0)], "has the unknown data type 36 (IQ4_NL_4_4, which GGUF has dropped)"),
        ([description("a", (1,), 0, 4)], "its offset 4 is no multiple of the alignment 32"),
        ([ONE_TENSOR, ONE_TENSOR], "a.weight at offset 117: occurs twice"),
        ([ONE_TENSOR, description("b", (2,), 0, 32)], "overlaps a.weight, which ends at byte"),
    ],
)  # fmt: skip
def test_tensors(tmp_path: Path, tensors: list[bytes], message: str) -> None:
    assert message in one_fault(tmp_path, gguf(tensors=tensors, data=bytes(100)))


@pytest.mark.parametrize("dims", [(1 << 62, 4), (1 << 32, 1 << 32), ((1 << 64) - 1,) * 4, (1 << 20,)])
def test_huge_tensors_cost_nothing(tmp_path: Path, dims: tuple[int, ...]) -> None:
    fault = one_fault(tmp_path, gguf(tensors=[description("a", dims, 24, 0)], data=bytes(64)))
    assert "it was cut off, or the description is wrong" in fault


def test_huge_offsets(tmp_path: Path) -> None:
    fault = one_fault(tmp_path, gguf(tensors=[description("a", (1,), 0, (1 << 64) - 32)], data=bytes(64)))
    assert "the file has 192; it was cut off" in fault


def test_bytes_cut_off_or_added(tmp_path: Path) -> None:
    good = gguf(tensors=[description("a", (64, 4), 8, 0)], data=b"\1" * (4 * 68))
    assert validate(write(tmp_path, good)).valid
    assert "Q8_0 [4, 64] ends at byte 400, the file has 300" in one_fault(tmp_path, good[:-100])
    report = validate(write(tmp_path, good + bytes(100)))
    assert report.valid
    assert [str(w) for w in report.warnings] == ["file at offset 416: 84 bytes after the last tensor belong to nothing"]
    for n_bytes in range(len(good)):
        assert not validate(write(tmp_path, good[:n_bytes])).valid


def test_all_faults_are_listed(tmp_path: Path) -> None:
    tensors = [description("a", (33,), 2, 0), description("b", (1,), 99, 0), description("c", (1,), 0, 1)]
    path = write(tmp_path, gguf(tensors=tensors, data=bytes(64)))
    assert len(validate(path).faults) == 3
    with pytest.raises(ShapeError, match=r"a at offset 69: .* \(2 more: `mlb validate` lists them\)"):
        open_gguf(path)


def test_split_files_are_told(tmp_path: Path) -> None:
    pairs = [ARCHITECTURE, pair("split.count", 2, 3)]
    (warning,) = validate(write(tmp_path, gguf(pairs))).warnings
    assert warning.message == "the model is split over 3 files; this is one of them"
    later = write(tmp_path, gguf([pair("split.no", 2, 1), pair("split.count", 2, 3)]))
    assert validate(later).valid  # only the first part names the architecture
    assert run(["inspect", str(later)]) == 0


def test_inspect_and_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [
        ARCHITECTURE,
        pair("llama.block_count", 4, 3),
        pair("tokenizer.ggml.model", 8, "gpt2"),
        pair("tokenizer.ggml.tokens", 9, (8, ["a"] * 9)),
        pair("general.name", 8, "bad\x1b[31mname"),
    ]
    path = write(tmp_path, gguf(pairs, [ONE_TENSOR], bytes(36)))
    assert run(["inspect", str(path), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for part in (
        "architecture     llama",
        "gpt2, 9 tokens",
        "a.weight  2 x 32  Q4_0",
        "['a', 'a', 'a', 'a', … 9 in all]",
    ):
        assert part in out
    assert run(["inspect", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "gguf"
    assert document["tables"]["bytes by data type"] == [
        {"type": "Q4_0", "tensors": 1, "weights": 64, "bytes": 36, "share %": 100.0}
    ]
    assert run(["validate", str(path)]) == 0
    path.write_bytes(path.read_bytes()[:-1])
    assert run(["validate", str(path)]) == 1
    assert "ML_E_FORMAT: a.weight" in capsys.readouterr().out


def test_looking_at_files_imports_no_heavy_library(tmp_path: Path) -> None:
    from tests.test_architecture import modules_after

    path = write(tmp_path, gguf(tensors=[ONE_TENSOR], data=bytes(36)))
    assert not modules_after("inspect", str(path)) & {"torch", "numba", "tokenizers", "gguf", "tqdm"}
