"""Every data type of MLLM and GGUF files: bytes to floats, by the gguf package or by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from krafla_cli.errors import DataError, ShapeError, UnsupportedError
from krafla_cli.formats.data_types import BY_GGML, BY_MLLM, BY_NAME, DATA_TYPES, DataType
from krafla_cli.quant import ggml_blocks, mxfp4
from krafla_cli.quant.blocks import Quantized, WeightError
from krafla_cli.quant.types import _BY_GGUF, deinterleave, dequantize, quantize

# The table of the MLLM documentation: number -> (name, version).
MLLM_TABLE = {
    0: ("F32", 1), 1: ("F16", 1), 2: ("Q4_0", 1), 3: ("Q4_1", 1), 8: ("Q8_0", 1), 9: ("Q8_1", 1),
    10: ("Q8_PERTENSOR", 1), 12: ("Q4_K", 1), 14: ("Q6_K", 1), 15: ("Q8_K", 1), 16: ("I8", 1), 17: ("I16", 1),
    18: ("I32", 1), 19: ("Q4_0_4_4", 1), 20: ("Q4_0_4_8", 1), 21: ("Q4_0_8_8", 1), 22: ("Q8_0_4_4", 1),
    23: ("Q3_K", 1), 24: ("Q2_K", 1), 25: ("Q1_K", 1), 26: ("IQ2_XXS", 1), 27: ("IQ2_XS", 1), 28: ("IQ1_S", 1),
    29: ("IQ1_M", 1), 30: ("IQ2_S", 1), 128: ("BF16", 2), 129: ("U8", 2), 130: ("U16", 2), 131: ("U32", 2),
    132: ("I64", 2), 133: ("U64", 2), 134: ("BYTE", 2), 135: ("MXFP4", 2),
}  # fmt: skip


def by(name: str) -> DataType:
    return BY_NAME[name]


def as_bytes(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def f16(value: float) -> np.ndarray:
    return np.array([value], "<f2").view(np.uint8)


def test_the_table_is_mllms() -> None:
    assert {n: (t.name, t.mllm_version) for n, t in BY_MLLM.items()} == MLLM_TABLE
    assert len(BY_NAME) == len(DATA_TYPES)


def test_sizes_are_ggmls() -> None:
    names = {"GGML_MXFP4": "MXFP4"}
    for number, kind in BY_GGML.items():
        if number in (31, 32, 33):  # gone from the package
            continue
        constant = gguf.GGMLQuantizationType[names.get(kind.name, kind.name)]
        assert constant == number
        if kind.name != "Q8_1":  # the package still states the size that the block had with float scales
            assert gguf.GGML_QUANT_SIZES[constant] == (kind.block, kind.n_bytes)


@pytest.mark.parametrize("name", sorted({*_BY_GGUF, "Q4_0", "Q8_0"}))
def test_blocks_are_decoded_as_by_the_gguf_package(name: str) -> None:
    kind = by(name)
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (6, 2 * kind.n_bytes), dtype=np.uint8)
    constant = gguf.GGMLQuantizationType[_BY_GGUF.get(name, name)]
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, constant)
        got = dequantize(data, kind, (3, 2, 2 * kind.block))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.reshape(6, -1), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("F32", "f4"), ("F64", "f8"), ("I8", "i1"), ("I16", "i2"), ("I32", "i4"), ("I64", "i8"), ("U8", "u1"),
     ("U16", "u2"), ("U32", "u4"), ("U64", "u8"), ("F16", "f2")],
)  # fmt: skip
def test_plain_numbers(name: str, dtype: str) -> None:
    values = np.array([0, 1, 5, 120, 3, 2], dtype=dtype)
    got = dequantize(values.view(np.uint8), by(name), (2, 3))
    np.testing.assert_array_equal(got, values.reshape(2, 3).astype(np.float32))


def test_bf16() -> None:
    data = np.array([0x3F80, 0xC2F7, 0x0001], "<u2").view(np.uint8)
    np.testing.assert_array_equal(dequantize(data, by("BF16"), (3,)), np.float32([1.0, -123.5, 2.0**-133]))


def test_q8_1_by_hand() -> None:
    quants = np.arange(-16, 16, dtype=np.int8)
    block = np.concatenate([f16(0.5), f16(-8.0), quants.view(np.uint8)])
    np.testing.assert_array_equal(dequantize(block, by("Q8_1"), (32,)), quants * np.float32(0.5))


def test_q8_k_by_hand() -> None:
    quants = (np.arange(256) - 128).astype(np.int8)
    sums = np.zeros(32, np.uint8)
    block = np.concatenate([np.array([0.3], "<f4").view(np.uint8), quants.view(np.uint8), sums])
    np.testing.assert_array_equal(dequantize(block, by("Q8_K"), (256,)), quants * np.float32(0.3))


def test_q8_per_tensor_needs_its_scale() -> None:
    quants = np.arange(-32, 32, dtype=np.int8)
    data = quants.view(np.uint8)
    np.testing.assert_array_equal(dequantize(data, by("Q8_PERTENSOR"), (2, 32), 0.25).ravel(), quants * 0.25)
    with pytest.raises(UnsupportedError, match="Q8_PERTENSOR: its scale is not in the tensor"):
        dequantize(data, by("Q8_PERTENSOR"), (2, 32))


@pytest.mark.parametrize("name", ["Q1_K", "BYTE"])
def test_opaque_types_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        dequantize(as_bytes(1, 2, 3), by(name), (3,))


def test_sizes_must_fit() -> None:
    with pytest.raises(ShapeError, match="Q4_0: 18 bytes for 64 weights, must be 36"):
        dequantize(np.zeros(18, np.uint8), by("Q4_0"), (2, 32))
    with pytest.raises(ShapeError, match="Q4_0: 18 bytes for 33 weights, must be None"):
        dequantize(np.zeros(18, np.uint8), by("Q4_0"), (33,))


# ---------------------------------------------------------------------------------------------------------------------
# Interleaved types: an independent transcription of how ggml interleaves (row by row, byte by byte).


def interleave(blocks: np.ndarray, n_rows: int, chunk: int, flip: int) -> np.ndarray:
    """``blocks`` [rows, n, block bytes] as groups of ``n_rows`` rows; quants XOR ``flip``."""
    out = bytearray()
    for first in range(0, len(blocks), n_rows):
        for b in range(blocks.shape[1]):
            group = [bytes(blocks[first + r, b]) for r in range(n_rows)]
            out += b"".join(g[:2] for g in group)
            for i in range(0, len(group[0]) - 2, chunk):
                for g in group:
                    out += bytes(byte ^ flip for byte in g[2 + i : 2 + i + chunk])
    return np.frombuffer(bytes(out), np.uint8)


@pytest.mark.parametrize(
    ("name", "plain", "n_rows", "chunk", "flip"),
    [("Q4_0_4_4", "Q4_0", 4, 4, 0x88), ("Q4_0_4_8", "Q4_0", 4, 8, 0x88), ("Q4_0_8_8", "Q4_0", 8, 8, 0x88),
     ("Q8_0_4_4", "Q8_0", 4, 4, 0)],
)  # fmt: skip
def test_interleaved_types(name: str, plain: str, n_rows: int, chunk: int, flip: int) -> None:
    rng = np.random.default_rng(1)
    rows, cols = 16, 96
    blocks = rng.integers(0, 256, (rows, cols // 32, by(plain).n_bytes), dtype=np.uint8)
    data = interleave(blocks, n_rows, chunk, flip)
    np.testing.assert_array_equal(deinterleave(data, by(name), rows, cols), blocks.reshape(rows, -1))
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks.reshape(rows, -1), gguf.GGMLQuantizationType[plain])
        np.testing.assert_array_equal(dequantize(data, by(name), (rows, cols)), expected)


def test_interleaved_rows_come_in_groups() -> None:
    data = np.zeros(6 * 18, np.uint8)
    with pytest.raises(ShapeError, match="Q4_0_4_4: 6 x 32 weights are no groups of 4 rows"):
        dequantize(data, by("Q4_0_4_4"), (6, 32))
    with pytest.raises(ShapeError, match="a vector has no rows"):
        dequantize(np.zeros(72, np.uint8), by("Q4_0_4_4"), (128,))


# ---------------------------------------------------------------------------------------------------------------------
# MXFP4


def test_mxfp4_all_codes_by_hand() -> None:
    """Byte k holds element 2k low, 2k + 1 high; the scale comes last."""
    block = as_bytes(*(0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE), *(0,) * 8, 128)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    got = dequantize(block, by("MXFP4"), (32,))
    np.testing.assert_array_equal(got, np.float32([2 * v for v in table] + [0] * 16))
    assert np.signbit(got[8])
    assert not np.signbit(got[0])


@pytest.mark.parametrize(("scale", "one"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127)])
def test_mxfp4_scales(scale: int, one: float) -> None:
    block = as_bytes(*(0x21,) * 16, scale)
    np.testing.assert_array_equal(dequantize(block, by("MXFP4"), (32,))[:2], np.float32([one / 2, one]))


def test_mxfp4_nan_scale_is_refused() -> None:
    data = np.concatenate([np.zeros(17, np.uint8), as_bytes(*(0,) * 16, 255)])
    with pytest.raises(DataError, match="MXFP4 block 1: scale 255 stands for NaN"):
        dequantize(data, by("MXFP4"), (64,))


def test_mxfp4_and_ggmls_hold_the_same_numbers() -> None:
    """Only the order of scale and nibbles differs."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 16, 32, dtype=np.uint8)
    ours = np.concatenate([codes[0::2] | codes[1::2] << 4, as_bytes(125)])
    ggmls = np.concatenate([as_bytes(125), codes[:16] | codes[16:] << 4])
    np.testing.assert_array_equal(dequantize(ours, by("MXFP4"), (32,)), dequantize(ggmls, by("GGML_MXFP4"), (32,)))


def test_mxfp4_quantize_by_hand() -> None:
    """The largest is 7: scale 2^0; 7 saturates to 6, ties go to even codes, signs stay."""
    values = np.zeros((1, 32), np.float32)
    values[0, :10] = [7, -7, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.26]
    block = mxfp4.quantize_blocks(values)
    assert block[0, 16] == 127
    np.testing.assert_array_equal(
        dequantize(block, by("MXFP4"), (32,))[:10], np.float32([6, -6, 0, 1, 1, 2, 2, 4, 4, -0.5])
    )


@pytest.mark.parametrize("factor", [1.0, 2.0**-120, 2.0**100, 3e-39])
def test_mxfp4_quantize_takes_the_nearest(factor: float) -> None:
    rng = np.random.default_rng(7)
    values = (rng.standard_normal((50, 32)) * factor).astype(np.float32)
    blocks = mxfp4.quantize_blocks(values)
    got = mxfp4.dequantize_blocks(blocks)
    levels = np.ldexp(mxfp4.VALUES.astype(np.float64), blocks[:, 16:].astype(int) - 127)
    best = np.abs(values[:, :, None] - levels[:, None, :]).min(axis=2)
    np.testing.assert_array_equal(np.abs(values - got.astype(np.float64)), best)


def test_mxfp4_round_trip_of_every_code_and_of_zero() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    block = np.concatenate([codes[0::2] | codes[1::2] << 4, as_bytes(130)])[None]
    np.testing.assert_array_equal(mxfp4.quantize_blocks(mxfp4.dequantize_blocks(block)), block)
    assert not mxfp4.quantize_blocks(np.zeros((1, 32), np.float32)).any()


# ---------------------------------------------------------------------------------------------------------------------
# Encoding, and Q4_0 and Q8_0 blocks


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_quantized_blocks_are_ggmls(name: str) -> None:
    """Q8_0 scales are rounded before the quants are taken, so quants may differ from ggml's by one level."""
    rng = np.random.default_rng(2)
    values = rng.standard_normal((4, 96)).astype(np.float32)
    ours = quantize(values, by(name))
    theirs = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    assert ours.shape == theirs.shape
    step = np.abs(values).max() / (8 if name == "Q4_0" else 127)
    difference = dequantize(ours, by(name), values.shape) - gguf.dequantize(theirs, gguf.GGMLQuantizationType[name])
    assert np.abs(difference).max() <= 1.01 * step


def test_quantize_refuses() -> None:
    with pytest.raises(UnsupportedError, match="Q6_K is not written"):
        quantize(np.zeros((1, 256), np.float32), by("Q6_K"))
    with pytest.raises(ShapeError, match="rows of 33 weights"):
        quantize(np.zeros((1, 33), np.float32), by("MXFP4"))
    with pytest.raises(DataError, match="NaN"):
        quantize(np.full((1, 32), np.nan, np.float32), by("MXFP4"))


@pytest.mark.parametrize("encoding", ["q4_0", "q8_0"])
def test_split_and_join(encoding: str) -> None:
    rng = np.random.default_rng(4)
    kind = by(encoding.upper())
    data = rng.integers(0, 256, (5, 3 * kind.n_bytes), dtype=np.uint8)
    parts = ggml_blocks.split(data, encoding, 5, 96)
    assert parts.d.shape == (5, 3)
    assert bytes(parts.d[0, 1].tobytes()) == bytes(data[0, kind.n_bytes : kind.n_bytes + 2])
    np.testing.assert_array_equal(ggml_blocks.join(parts, encoding), data)


def test_blocks_with_minus_128_are_quantized_anew() -> None:
    q = np.full((2, 64), 5, np.int8)
    q[1, 40] = -128
    d = np.float16([[1, 2], [3, 0.5]])
    result, n_bad = ggml_blocks.without_minus_128(Quantized(q, d))
    assert n_bad == 1
    np.testing.assert_array_equal(result.q[0], q[0])
    np.testing.assert_array_equal(result.q[1, :32], q[1, :32])
    # The largest is 64 = 127 x d, in f16.
    assert result.d[1, 1] == np.float16(64 / 127)
    assert result.q[1, 40] == -127
    assert q[1, 40] == -128  # the source stays as it is


def test_scales_must_be_numbers() -> None:
    d = np.float16([[1, 2], [3, np.inf]])
    with pytest.raises(WeightError, match="row 1, column 32: its block has the scale inf"):
        ggml_blocks.check_scales(Quantized(np.zeros((2, 32), np.uint8), d))


@pytest.mark.parametrize("encoding", ["q4_0", "q8_0"])
def test_zero_blocks(encoding: str) -> None:
    blocks = ggml_blocks.join(ggml_blocks.zero_blocks(encoding, 2, 1), encoding)
    assert not dequantize(blocks, by(encoding.upper()), (2, 32)).any()
