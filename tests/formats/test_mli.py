"""MLI1 files against hand-written bytes, and hostile ones."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.errors import FileError, FormatError, ShapeError
from krafla_cli.formats.detect import detect
from krafla_cli.formats.mli import Dimensions, Imatrix, read, slots, validate, write

# Two layers of dim 2, q_dim 3, hidden_dim 1: 2 + 3 + 2 + 1 sums a layer, then 2 of the classifier.
DIMENSIONS = Dimensions(n_layers=2, dim=2, hidden_dim=1, q_dim=3)
GOLDEN = b"MLI1" + struct.pack("<IIIIIQQ", 1, 2, 2, 1, 3, 1 << 33, 5) + struct.pack("<18d", *range(18))


def _file(tmp_path: Path, data: bytes) -> Path:
    (tmp_path / "i.mli").write_bytes(data)
    return tmp_path / "i.mli"


def test_golden_bytes(tmp_path: Path) -> None:
    path = _file(tmp_path, GOLDEN)
    imatrix = read(path)
    assert imatrix.dimensions == DIMENSIONS
    assert (imatrix.layer_tokens, imatrix.classifier_tokens) == (1 << 33, 5)
    assert {place: imatrix.of(*place).tolist() for place in slots(DIMENSIONS)} == {
        (0, "attn_in"): [0, 1],
        (0, "attn_out"): [2, 3, 4],
        (0, "ffn_in"): [5, 6],
        (0, "ffn_act"): [7],
        (1, "attn_in"): [8, 9],
        (1, "attn_out"): [10, 11, 12],
        (1, "ffn_in"): [13, 14],
        (1, "ffn_act"): [15],
        (None, "classifier"): [16, 17],
    }
    assert imatrix.to_bytes() == GOLDEN
    assert detect(path).kind == "mli"
    assert validate(path).valid


def test_q_dim_equal_to_dim_is_stored_as_zero(tmp_path: Path) -> None:
    same = Dimensions(1, 2, 1, 2)
    write(Imatrix.empty(same), tmp_path / "i.mli")
    assert (tmp_path / "i.mli").read_bytes()[20:24] == bytes(4)
    assert read(tmp_path / "i.mli").dimensions == same


def test_q_dim_written_although_it_is_dim_is_read_with_a_warning(tmp_path: Path) -> None:
    data = b"MLI1" + struct.pack("<IIIIIQQ", 1, 1, 2, 1, 2, 1, 1) + struct.pack("<9d", *[1] * 9)
    report = validate(_file(tmp_path, data))
    assert report.valid
    assert [str(w) for w in report.warnings] == ["q_dim at offset 20: is dim: it is written as 0 then"]


def test_write_does_not_overwrite(tmp_path: Path) -> None:
    path = _file(tmp_path, b"mine")
    with pytest.raises(FileError, match="exists already; --force"):
        write(Imatrix.empty(DIMENSIONS), path)
    assert path.read_bytes() == b"mine"
    write(Imatrix.empty(DIMENSIONS), path, force=True)
    assert read(path).dimensions == DIMENSIONS


def test_add(tmp_path: Path) -> None:
    imatrix = read(_file(tmp_path, GOLDEN))
    imatrix.add(read(_file(tmp_path, GOLDEN)))
    assert imatrix.sums.tolist() == [2 * i for i in range(18)]
    assert (imatrix.layer_tokens, imatrix.classifier_tokens) == (1 << 34, 10)
    with pytest.raises(ShapeError, match=r"of 2 layers, dim 2, .* q_dim 3 and of 1 layers"):
        imatrix.add(Imatrix.empty(Dimensions(1, 2, 1, 3)))


def _with(offset: int, code: str, value: float) -> bytes:
    data = bytearray(GOLDEN)
    struct.pack_into("<" + code, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (b"", "ML_E_FORMAT", "header at offset 0: needs 40 bytes, the file is empty"),
        (GOLDEN[:39], "ML_E_FORMAT", "header at offset 0: needs 40 bytes, the file has 39 bytes"),
        (b"MLI2" + GOLDEN[4:], "ML_E_FORMAT", 'magic at offset 0: must be "MLI1"'),
        (_with(4, "I", 2), "ML_E_FORMAT", "version at offset 4: must be 1, is 2"),
        (_with(8, "I", 0), "ML_E_SHAPE", "n_layers at offset 8: must be 1 to 65536, is 0"),
        (_with(12, "I", 65537), "ML_E_SHAPE", "dim at offset 12: must be 1 to 65536, is 65537"),
        (_with(16, "I", 0), "ML_E_SHAPE", "hidden_dim at offset 16: must be 1 to 65536, is 0"),
        (_with(20, "I", 1 << 31), "ML_E_SHAPE", "q_dim at offset 20"),
        (GOLDEN[:-100], "ML_E_FORMAT", "file: 84 bytes, the header implies 184"),
        (GOLDEN + bytes(100), "ML_E_FORMAT", "file: 284 bytes, the header implies 184"),
        (_with(8, "I", 65536), "ML_E_FORMAT", "file: 184 bytes, the header implies 4194360"),
        (_with(40 + 8 * 12, "d", np.nan), "ML_E_FORMAT", "layers.1.attn_out at offset 136: sum of channel 2 must be"),
        (_with(40 + 8 * 17, "d", -1.0), "ML_E_FORMAT", "classifier at offset 176: sum of channel 1 .* is -1"),
        (_with(40, "d", np.inf), "ML_E_FORMAT", "layers.0.attn_in at offset 40: sum of channel 0 .* is inf"),
    ],
)
def test_broken_files(tmp_path: Path, data: bytes, status: str, text: str) -> None:
    path = _file(tmp_path, data)
    assert validate(path).status == status
    with pytest.raises(FormatError, match=text) as error:
        read(path)
    assert error.value.status == status
    assert str(error.value).startswith(str(path))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read(tmp_path / "none.mli")
