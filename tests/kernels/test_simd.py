"""Vector operations against NumPy; `make test-slow` runs all that uses kernels again in AVX2 and plain LLVM code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from krafla_cli.kernels import features
from krafla_cli.kernels.simd import (
    absolute_i8,
    bits_of,
    columns_of_16,
    columns_of_32,
    copysign,
    dot_pairs,
    dot_pairs_i16,
    flip_high_bits,
    fma,
    from_bits,
    high_nibbles,
    lane_numbers,
    largest_magnitude,
    load_4_bytes,
    load_f16,
    load_f32,
    load_i8,
    load_i8x16,
    load_two_rows,
    low_nibbles,
    max_f32,
    maximum,
    minimum,
    pack_i8,
    row_sums_i32,
    select,
    spread_f32,
    spread_i16,
    store_f16,
    store_f32,
    store_i8,
    sum_f32,
    sum_i32,
    sums_of_8_rows,
    to_f32,
    transpose_f32,
    truncate,
    with_sign_of,
)

RNG = np.random.default_rng(0)
FOLDER = Path(__file__).parents[1]


@numba.njit
def _floats(x, y, out, numbers):  # 8 values each; out [13, 8]
    a, b = load_f32(x, 0), load_f32(y, 0)
    store_f32(out, 0, a + b)
    store_f32(out, 8, a - 2.0)
    store_f32(out, 16, 3.0 * b)
    store_f32(out, 24, a / b)
    store_f32(out, 32, fma(a, b, a))
    store_f32(out, 40, minimum(a, b))
    store_f32(out, 48, maximum(a, b))
    store_f32(out, 56, copysign(a, b))
    store_f32(out, 64, select((a < b) & (b > 0.0), a, b))
    store_f32(out, 72, to_f32(truncate(a * 100.0)))
    store_f32(out, 80, from_bits((bits_of(a) & 0x7FFFFFFF) | (1 << 30)))
    t = transpose_f32(a, b, a, b, b, b, a, lane_numbers())
    store_f32(out, 88, t[0])
    store_f32(out, 96, t[7])
    numbers[0] = sum_f32(a)
    numbers[1] = max_f32(a)
    numbers[2] = largest_magnitude(a, b, a - 9.0, b)
    numbers[3] = sum_i32(truncate(a * 100.0))


def test_float_operations() -> None:
    x, y = RNG.standard_normal((2, 8)).astype(np.float32)
    out, numbers = np.zeros((13, 8), np.float32), np.zeros(4, np.float32)
    _floats(x, y, out.reshape(-1), numbers)
    hundred = np.trunc(x * np.float32(100))
    bits = ((x.view(np.int32) & 0x7FFFFFFF) | (1 << 30)).view(np.float32)
    rows = np.array([x, y, x, y, y, y, x, np.arange(8, dtype=np.float32)])
    fused = (x.astype(float) * y + x).astype(np.float32)
    want = [x + y, x - 2, 3 * y, x / y, fused, np.minimum(x, y), np.maximum(x, y), np.copysign(x, y)]
    want += [np.where((x < y) & (y > 0), x, y), hundred, bits, rows[:, 0], rows[:, 7]]
    np.testing.assert_array_equal(out, np.array(want, np.float32))
    folded = ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    largest = max(np.abs(x).max(), np.abs(y).max(), np.abs(x - 9).max())
    np.testing.assert_array_equal(numbers, np.array([folded, x.max(), largest, hundred.sum()], np.float32))


@numba.njit
def _bytes(q, s, out, sums):  # q u8 [8, 32], s i8 [32]; out u8 [24, 32]; sums f32 [4, 8]
    a, b = load_i8(q, 0), load_i8(s, 0)
    store_i8(out, 0, load_two_rows(q, s, 5))
    store_i8(out, 32, low_nibbles(a))
    store_i8(out, 64, high_nibbles(a))
    store_i8(out, 96, flip_high_bits(a))
    store_i8(out, 128, absolute_i8(b))
    store_i8(out, 160, with_sign_of(b, a))
    store_i8(out, 192, load_4_bytes(q, 7))
    eight = columns_of_32(
        load_i8(q, 0),
        load_i8(q, 32),
        load_i8(q, 64),
        load_i8(q, 96),
        load_i8(q, 128),
        load_i8(q, 160),
        load_i8(q, 192),
        load_i8(q, 224),
    )
    store_i8(out, 224, eight[0])
    store_i8(out, 256, eight[5])
    four = columns_of_16(
        load_i8x16(q, 0),
        load_i8x16(q, 32),
        load_i8x16(q, 64),
        load_i8x16(q, 96),
        load_i8x16(q, 128),
        load_i8x16(q, 160),
        load_i8x16(q, 192),
        load_i8x16(q, 224),
    )
    store_i8(out, 288, four[0])
    store_i8(out, 320, four[1])
    store_i8(out, 352, four[2])
    store_i8(out, 384, four[3])
    p = dot_pairs(low_nibbles(a), b)
    r = dot_pairs(high_nibbles(a), b)
    i = dot_pairs_i16(p, spread_i16(np.int16(1)))
    j = dot_pairs_i16(r, p)
    store_f32(sums, 0, to_f32(sums_of_8_rows(p, r, p, p, spread_i16(np.int16(-50)))))
    store_f32(sums, 8, to_f32(row_sums_i32(i, j, i, i, j, i, j, j)))
    store_f32(sums, 16, to_f32(i))
    store_i8(
        out, 416, pack_i8(truncate(spread_f32(-128.0)), truncate(lane_numbers()), truncate(spread_f32(127.0)), i & 1)
    )


def test_byte_operations() -> None:
    q = RNG.integers(0, 256, (8, 32), np.uint8)
    s = RNG.integers(-127, 128, 32).astype(np.int8)
    out, sums = np.zeros((14, 32), np.uint8), np.zeros((3, 8), np.float32)
    _bytes(q.reshape(-1), s, out.reshape(-1), sums.reshape(-1))
    a = q[0]
    columns = q.reshape(8, 8, 4).transpose(1, 0, 2).reshape(8, 32)
    signed = (s * np.sign(a.view(np.int8))).astype(np.int8)
    two = np.concatenate((q.reshape(-1)[5:21], s.view(np.uint8)[5:21]))
    want = [two, a & 15, a >> 4, a ^ 128, np.abs(s).view(np.uint8)]
    want += [signed.view(np.uint8), np.tile(q.reshape(-1)[7:11], 8), columns[0], columns[5], *columns[:4]]
    p, r = ((v.astype(int) * s).reshape(16, 2).sum(1) for v in (a & 15, a >> 4))
    i, j = p.reshape(8, 2).sum(1), (p * r).reshape(8, 2).sum(1)
    packed = np.array([-128] * 8 + [*range(8)] + [127] * 8 + list(i & 1), np.int8)
    np.testing.assert_array_equal(out, [*want, packed.view(np.uint8)])
    halves = [v.reshape(2, 8).sum(1) - 100 for v in (p, r, p, p)]
    i_sum, j_sum = i.sum(), j.sum()
    np.testing.assert_array_equal(sums[0], np.transpose(halves).reshape(-1))
    np.testing.assert_array_equal(sums[1], [i_sum, j_sum, i_sum, i_sum, j_sum, i_sum, j_sum, j_sum])
    np.testing.assert_array_equal(sums[2], i)


@numba.njit
def _widen(halves, out):
    for i in range(0, len(halves), 8):
        store_f32(out, i, load_f16(halves, i))


@numba.njit
def _narrow(floats, out):
    for i in range(0, len(floats), 8):
        store_f16(out, i, load_f32(floats, i))


def test_f16_conversions() -> None:
    """All f16 values, and float32 values around every one of them: both neighbours, the midpoints, ties."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    wide = np.zeros(len(halves), np.float32)
    _widen(halves, wide)
    np.testing.assert_array_equal(wide, halves.view(np.float16).astype(np.float32))
    finite = wide[np.isfinite(wide)]
    nearby = [finite, np.nextafter(finite, np.float32(np.inf)), np.nextafter(finite, np.float32(-np.inf))]
    middle = (finite[:-1].astype(np.float64) + finite[1:]).astype(np.float32) / 2
    nearby += [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    floats = np.concatenate([*nearby, np.float32([np.inf, -np.inf, 65519.99, 65520, 1e-8, -0.0, 0.0, 1e38])])
    floats = floats[: len(floats) // 8 * 8]
    got = np.zeros(len(floats), np.uint16)
    _narrow(floats, got)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, floats.astype(np.float16).view(np.uint16))


def test_the_lowering_is_the_one_asked_for() -> None:
    lowering = os.environ.get("MLB_SIMD")
    assert not (features.AVX2 and lowering == "generic")
    assert not (features.AVX512 and lowering in ("generic", "avx2"))


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["generic", "avx2"])
def test_kernels_in_other_instructions(lowering: str) -> None:
    environment = {**os.environ, "MLB_SIMD": lowering}
    parts = ("kernels", "quant", "runtime/test_fast.py", "embed/test_forward.py", "embed/test_search.py")
    tests = [str(FOLDER / part) for part in parts]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER.parent)
    assert result.returncode == 0, result.stdout[-2000:]
