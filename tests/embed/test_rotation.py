"""The rotation of a fingerprint: orthogonal, block-diagonal, Haar-distributed, and the same everywhere."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest

from krafla_cli.embed.rotation import _ln, _normals, blocks_of, rotate, rotation

KEY = bytes(range(32))


def test_blocks_lie_between_the_widths() -> None:
    assert blocks_of((4, 8, 12)) == ((0, 4), (4, 8), (8, 12))
    assert blocks_of((384,)) == ((0, 384),)


@pytest.mark.parametrize("dims", [(1,), (2, 3), (64, 128, 200)])
def test_orthogonal_to_float64(dims: tuple[int, ...]) -> None:
    for block, (start, end) in zip(rotation(KEY, 7, dims), blocks_of(dims), strict=True):
        assert block.shape == (end - start, end - start)
        assert np.abs(block @ block.T - np.eye(end - start)).max() <= 1e-14


def philox_words(key: tuple[int, int], n: int) -> list[int]:
    """Philox4x64-10 (Salmon et al., 2011) with counters 1, 2, ..., as numpy's generator steps before it draws."""
    mask, words = 2**64 - 1, []
    for counter in range(1, n // 4 + 2):
        c, (k0, k1) = (counter, 0, 0, 0), key
        for _ in range(10):
            p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = ((p1 >> 64) ^ c[1] ^ k0, p1 & mask, (p0 >> 64) ^ c[3] ^ k1, p0 & mask)
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        words += c
    return words[:n]


def plain_block(key: bytes, license_id: int, start: int, end: int) -> np.ndarray:
    """The construction of the module's docstring in plain Python."""
    digest = hashlib.sha256(b"mlb fingerprint 1" + key + struct.pack("<3I", license_id, start, end)).digest()
    words = iter(philox_words(struct.unpack("<2Q", digest[:16]), 4 * (end - start) * (end - start + 1) + 64))
    normals: list[float] = []
    n = end - start
    while len(normals) < n * (n + 1) // 2:
        u, v = (2 * (next(words) >> 11) / 2**53 - 1 for _ in range(2))
        s = u * u + v * v
        if 0 < s < 1:
            f = math.sqrt(-2 * math.log(s) / s)
            normals += [round(u * f * 2**20) / 2**20, round(v * f * 2**20) / 2**20]
    q = np.zeros((0, 0))
    for k in range(1, n + 1):
        x = np.array(normals[k * (k - 1) // 2 : k * (k + 1) // 2])
        sign = 1.0 if x[0] >= 0 else -1.0
        u_vector = x + sign * np.linalg.norm(x) * np.eye(k)[0]
        reflection = np.eye(k) - 2 * np.outer(u_vector, u_vector) / (u_vector @ u_vector)
        larger = np.eye(k)
        larger[1:, 1:] = q
        q = -sign * reflection @ larger
    return q


def test_the_construction_in_plain_python() -> None:
    for license_id, start, end in ((7, 0, 3), (0xFFFFFFFF, 4, 24), (1, 0, 1), (2, 8, 40)):
        block = rotation(KEY, license_id, (start, end) if start else (end,))[-1]
        assert np.abs(block - plain_block(KEY, license_id, start, end)).max() <= 1e-12


def test_the_construction_is_fixed() -> None:
    """A model sold years ago must still be found: these values never change, on any machine."""
    block = rotation(KEY, 7, (3,))[0]
    golden = [
        [-0.6922975507661675, -0.02802226358566587, 0.7210678566866658],
        [0.6994898808956618, 0.21946541765092728, 0.6801094301506763],
        [0.17730766404117726, -0.9752177619377324, 0.1323340812996464],
    ]
    assert np.abs(block - golden).max() <= 1e-12
    large = rotation(KEY, 0xFFFFFFFF, (4, 24))[1]
    assert large[0, 0] == pytest.approx(-0.2602965174252754, abs=1e-12)
    assert large[19, 7] == pytest.approx(0.02772490017912578, abs=1e-12)


def test_key_license_and_block_all_matter() -> None:
    base = rotation(KEY, 7, (8,))[0]
    assert np.array_equal(base, rotation(KEY, 7, (8,))[0])
    for other in (rotation(KEY[::-1], 7, (8,))[0], rotation(KEY, 8, (8,))[0], rotation(KEY, 7, (8, 16))[1]):
        assert np.abs(base - other).max() > 0.1


def test_normals_are_rounded_and_normal() -> None:
    normals = _normals(KEY, 1, 0, 300)
    assert len(normals) == 300 * 301 // 2
    assert np.array_equal(normals * 2**20, np.rint(normals * 2**20))
    n = len(normals)
    assert abs(normals.mean()) < 5 / math.sqrt(n)
    assert abs(normals.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((normals**4).mean() - 3) < 5 * math.sqrt(96 / n)
    inside = np.mean(np.abs(normals) < 1)
    assert abs(inside - 0.682689) < 5 * math.sqrt(0.2166 / n)


def test_logarithm() -> None:
    x = np.concatenate([np.random.default_rng(0).uniform(0, 1, 1000), [2.0**-104, 1 - 2.0**-53, 0.5, math.sqrt(0.5)]])
    expected = np.array([math.log(v) for v in x.tolist()])
    assert np.abs(_ln(x) / expected - 1).max() < 1e-15


def test_haar_moments() -> None:
    """Traces of a Haar-distributed orthogonal matrix have mean 0 and variance 1; determinants are fair coins."""
    blocks = [rotation(bytes([i % 256]) * 32, i, (3,))[0] for i in range(1500)]
    traces = np.array([np.trace(b) for b in blocks])
    assert abs(traces.mean()) < 0.13
    assert abs(traces.var() - 1) < 0.2
    assert abs(np.mean([np.linalg.det(b) > 0 for b in blocks]) - 0.5) < 0.065
    entries = np.array([b[0, 0] for b in blocks])  # uniform on [-1, 1] in three dimensions
    assert abs(np.mean(np.abs(entries) < 0.5) - 0.5) < 0.065


def test_rotate_applies_each_block_to_its_rows() -> None:
    blocks = rotation(KEY, 7, (2, 5))
    dense = np.zeros((5, 5))
    dense[:2, :2], dense[2:, 2:] = blocks
    values = np.random.default_rng(0).standard_normal((5, 3))
    assert np.allclose(rotate(values, blocks), dense @ values, atol=1e-15)
    assert np.allclose(rotate(values[:, 0], blocks), dense @ values[:, 0], atol=1e-15)
