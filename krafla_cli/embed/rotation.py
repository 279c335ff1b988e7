"""The orthogonal matrix of a fingerprint: a fixed function of a 32-byte key, a license and the Matryoshka widths.

Section 7 of the LEMB specification asks for one orthogonal R on the projection. A dense R keeps cosines at full width
only: the first k values of R x mix all of x. So that cosines hold at *every* Matryoshka width, R is block-diagonal
along the Matryoshka boundaries, each block drawn from the Haar measure by itself.

The construction, for the block of output values start .. end - 1, n of them; all in IEEE float64 with +, -, x, / and
sqrt in the order given here, so that R is the same on every machine:

1. The digest SHA-256("mlb fingerprint 1" || key || license_id || start || end), integers as u32 little-endian; its
   first 16 bytes are, as two u64 little-endian, the key of Philox4x64-10, drawn from at the counters 1, 2, 3, ...
   (numpy.random.Philox steps its counter before it draws).
2. Normals: raw words two at a time give u, v = 2 w / 2^53 - 1 with w the upper 53 bits; where s = u^2 + v^2 is in
   (0, 1), Marsaglia's polar method gives u f and v f with f = sqrt(-2 ln(s) / s), each rounded to a multiple of 2^-20.
3. The subgroup algorithm (Diaconis, Shahshahani 1987; Stewart 1980): for k = 1 .. n take the next k normals x; with
   sign(0) = 1 and u = x + sign(x_0) |x| e_0, Q_k = -sign(x_0) (I - 2 u u^T / u^T u) (1 (+) Q_(k-1)); the block is Q_n.
"""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

KEY_BYTES = 32
_DOMAIN = b"mlb fingerprint 1"
_GRID = 2.0**20
_LN2 = 0.6931471805599453
_SERIES_TERMS = 21  # of the logarithm; the last one is below 2^-70


def blocks_of(dims: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The blocks (start, end) between the Matryoshka widths ``dims``, which ascend to ``output_dim``."""
    return tuple(pairwise((0, *dims)))


def rotation(key: bytes, license_id: int, dims: tuple[int, ...]) -> list[Float64]:
    """R's diagonal blocks, orthogonal float64 [n, n], one for each of ``blocks_of(dims)``."""
    return [_haar(_normals(key, license_id, start, end), end - start) for start, end in blocks_of(dims)]


def rotate(values: Float64, blocks: list[Float64]) -> Float64:
    """R times ``values`` [output_dim, ...], float64."""
    out = np.empty_like(values, np.float64)
    start = 0
    for block in blocks:
        end = start + len(block)
        out[start:end] = block @ values[start:end]
        start = end
    return out


def _normals(key: bytes, license_id: int, start: int, end: int) -> Float64:
    """The n (n + 1) / 2 normals of one block, multiples of 2^-20."""
    words = b"".join(value.to_bytes(4, "little") for value in (license_id, start, end))
    digest = hashlib.sha256(_DOMAIN + key + words).digest()
    philox = np.random.Philox(key=np.frombuffer(digest[:16], "<u8").astype(np.uint64))
    n = (end - start) * (end - start + 1) // 2
    found: list[Float64] = []
    n_found = 0
    while n_found < n:
        raw = philox.random_raw(2 * max(64, int(0.7 * (n - n_found))))
        found.append(_polar(np.asarray(raw, np.uint64)))
        n_found += len(found[-1])
    return np.concatenate(found)[:n]


def _polar(raw: npt.NDArray[np.uint64]) -> Float64:
    uniform = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    u, v = uniform[0::2], uniform[1::2]
    s = u * u + v * v
    inside = (s > 0) & (s < 1)
    u, v, s = u[inside], v[inside], s[inside]
    f = np.sqrt(-2.0 * _ln(s) / s)
    pairs = np.stack([u * f, v * f], axis=1).ravel()
    rounded: Float64 = np.rint(pairs * _GRID) / _GRID
    return rounded


def _ln(x: Float64) -> Float64:
    """The natural logarithm by +, x, / only: a library's may differ in its last bit from machine to machine."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa, exponent = np.where(low, 2.0 * mantissa, mantissa), exponent - low
    t = (mantissa - 1.0) / (mantissa + 1.0)
    square = t * t
    total = np.zeros_like(t)
    for k in range(2 * _SERIES_TERMS - 1, 0, -2):  # 2 (t + t^3 / 3 + t^5 / 5 + ...)
        total = total * square + 1.0 / k
    return exponent * _LN2 + 2.0 * t * total


def _haar(normals: Float64, n: int) -> Float64:
    """Step 3: a Haar-distributed orthogonal [n, n] from n (n + 1) / 2 normals."""
    q = np.zeros((n, n))
    start = 0
    for k in range(1, n + 1):
        x = normals[start : start + k].copy()
        start += k
        if not x.any():
            x[0] = 1.0 / _GRID  # no direction: a multiple of 2^-20 can be zero
        # Q_(k-1) sits in the lower right corner of Q_k, which sits in that of the whole.
        corner = q[n - k :, n - k :]
        corner[0, 0] = 1.0
        _reflect(corner, x)
    return q


def _reflect(m: Float64, x: Float64) -> None:
    """m <- -sign(x_0) (I - 2 u u^T / u^T u) m. Sums are loops, since the order of NumPy's is not defined."""
    sign = 1.0 if x[0] >= 0 else -1.0
    # Squares of multiples of 2^-20 are multiples of 2^-40: this sum is exact as long as it is below 2^13.
    norm = math.sqrt(_ordered_sum(x * x))
    u = x.copy()
    u[0] += sign * norm
    products = np.zeros(m.shape[1])
    for weight, row in zip(u.tolist(), m, strict=True):
        products += weight * row
    products *= 2.0 / _ordered_sum(u * u)
    m -= u[:, None] * products
    m *= -sign


def _ordered_sum(values: Float64) -> float:
    total = 0.0
    for value in values.tolist():
        total += value
    return total
