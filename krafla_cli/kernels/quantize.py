"""Block quantizers of the .mlb format: float32 rows in, quants and scales in the layout of the file out.

One block is 32 consecutive weights of a row. Every kernel works on whole rows in parallel, gives the same bits for any
number of threads, and uses float32 without fused multiply-add in the order written here, so that a scalar
transcription of the specification gives the same bits. Calls must not overlap: numba's own thread pool ends the
process when two threads enter it.

Shapes: ``w`` float32 [rows, cols]; ``d`` float32 [rows, cols / 32]; ``bad_block`` int64 [rows], the first block
of the row that cannot be stored (a weight that is NaN or infinite, or an f16 scale above 65504), else -1.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int8, int64, njit, prange, types, uint8, void

BLOCK = 32
F16_MAX = np.float32(65504)
_TINY_Q8 = np.float32(1e-30)
_TINY_Q4 = np.float32(1e-6)
_HUGE_Q4 = np.float32(1e6)
_N_CANDIDATES = 13
_CANDIDATES = np.array([-(60 + 2 * k) / 10 for k in range(_N_CANDIDATES)], np.float32)

_ROWS_IN = types.Array(float32, 2, "C", readonly=True, aligned=False)
_CHANNELS_IN = types.Array(float32, 1, "C", readonly=True, aligned=False)
_INT8 = int8[:, ::1]
_UINT8 = uint8[:, ::1]
_SCALES = float32[:, ::1]
_FAULTS = int64[::1]


@njit(inline="always")
def _to_f16(x):  # type: ignore[no-untyped-def]
    """The f16 value nearest to float32 ``x`` (ties to even), as float32; |x| at most 65504."""
    magnitude = abs(x)
    if magnitude < np.float32(2.0**-14):  # f16 subnormals are the multiples of 2^-24, as float32 in [0.5, 1) are
        rounded = (magnitude + np.float32(0.5)) - np.float32(0.5)
    else:
        bits = np.float32(magnitude).view(np.uint32)
        bits += np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        rounded = np.uint32(bits & np.uint32(0xFFFFE000)).view(np.float32)
    return np.float32(np.copysign(rounded, x))


@njit(inline="always")
def _largest(x):  # type: ignore[no-untyped-def]
    """The first element of largest magnitude of a block; infinity when any element is NaN or infinite."""
    largest = np.float32(0)
    for j in range(BLOCK):
        if not abs(x[j]) <= np.float32(3.4028235e38):
            return np.float32(np.inf)
        if abs(x[j]) > abs(largest):
            largest = x[j]
    return largest


@njit(inline="always")
def _sum_partials(p):  # type: ignore[no-untyped-def]
    """The order of a 256-bit register folded in halves: ((0+4)+(2+6)) + ((1+5)+(3+7))."""
    return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))


@njit(inline="always")
def _round_q8(x, inverse, q):  # type: ignore[no-untyped-def]
    for j in range(BLOCK):
        level = np.trunc(x[j] * inverse + np.copysign(np.float32(0.5), x[j]))
        q[j] = np.int8(min(max(level, np.float32(-127)), np.float32(127)))


@njit(
    void(_ROWS_IN, boolean, _INT8, _SCALES, _FAULTS),
    parallel=True,
    nogil=True,
    cache=True,
    error_model="numpy",
)
def quantize_q8_0(w, scale_f16, q, d, bad_block):  # type: ignore[no-untyped-def]
    """Q8_0 ("Quantization rule"); with ``scale_f16`` the quants are taken against the rounded scale."""
    for row in prange(w.shape[0]):
        bad_block[row] = -1
        for b in range(d.shape[1]):
            x = w[row, b * BLOCK : (b + 1) * BLOCK]
            q_block = q[row, b * BLOCK : (b + 1) * BLOCK]
            amax = abs(_largest(x))
            scale = amax / np.float32(127)
            inverse = np.float32(127) / amax
            if scale_f16 and scale <= F16_MAX:
                scale = _to_f16(scale)
                inverse = np.float32(1) / scale
            if amax < _TINY_Q8 or scale == np.float32(0):
                scale = np.float32(0)
                inverse = np.float32(0)
            elif amax == np.float32(np.inf) or (scale_f16 and scale > F16_MAX):
                bad_block[row] = b
                break
            d[row, b] = scale
            _round_q8(x, inverse, q_block)


@njit(inline="always")
def _pack_q4(levels, q):  # type: ignore[no-untyped-def]
    """Byte j holds element j in its low nibble and element j + 16 in its high nibble."""
    for j in range(BLOCK // 2):
        q[j] = np.uint8((int(levels[j]) + 8) | ((int(levels[j + BLOCK // 2]) + 8) << 4))


@njit(inline="always")
def _store_q4(scale, levels, scale_f16, q):  # type: ignore[no-untyped-def]
    """Stores the nibbles; returns the scale as stored, 0 for a block that cannot be told from zero, or NaN when it
    cannot be stored."""
    if scale_f16:
        if abs(scale) > F16_MAX:
            return np.float32(np.nan)
        scale = _to_f16(scale)
    if scale == np.float32(0):
        scale = np.float32(0)
        levels[:] = np.float32(0)
    _pack_q4(levels, q)
    return scale


@njit(
    void(_ROWS_IN, boolean, _UINT8, _SCALES, _FAULTS),
    parallel=True,
    nogil=True,
    cache=True,
    error_model="numpy",
)
def quantize_q4_0_round(w, scale_f16, q, d, bad_block):  # type: ignore[no-untyped-def]
    """Q4_0 by the rule of ``--q4-rule round``: the scale is the largest element / -8, levels against it unrounded."""
    for row in prange(w.shape[0]):
        bad_block[row] = -1
        levels = np.empty(BLOCK, np.float32)
        for b in range(d.shape[1]):
            x = w[row, b * BLOCK : (b + 1) * BLOCK]
            q_block = q[row, b * BLOCK // 2 : (b + 1) * BLOCK // 2]
            largest = _largest(x)
            if abs(largest) == np.float32(np.inf):
                bad_block[row] = b
                break
            scale = largest / np.float32(-8)
            inverse = np.float32(1) / scale
            if abs(inverse) == np.float32(np.inf):
                scale = np.float32(0)
                inverse = np.float32(0)
            for j in range(BLOCK):
                nibble = np.trunc(x[j] * inverse + np.float32(8.5))
                levels[j] = min(nibble, np.float32(15)) - np.float32(8)
            stored = _store_q4(scale, levels, scale_f16, q_block)
            if np.isnan(stored):
                bad_block[row] = b
                break
            d[row, b] = stored


@njit(inline="always")
def _level(x, to_level):  # type: ignore[no-untyped-def]
    return min(max(np.rint(x * to_level), np.float32(-8)), np.float32(7))


@njit(inline="always")
def _fit_block(x, weight, largest, levels):  # type: ignore[no-untyped-def]
    """The least-squares scale of the best candidate; fills ``levels``. All sums in 8 partials."""
    p_xx = np.zeros(8, np.float32)
    for j in range(BLOCK):
        p_xx[j % 8] += weight[j] * (x[j] * x[j])
    sum_xx = _sum_partials(p_xx)
    best_error = np.float32(np.inf)
    best_scale = np.float32(0)
    best_to_level = np.float32(0)
    for k in range(_N_CANDIDATES):
        to_level = _CANDIDATES[k] / largest
        p_xl = np.zeros(8, np.float32)
        p_ll = np.zeros(8, np.float32)
        for j in range(BLOCK):
            level = _level(x[j], to_level)
            p_xl[j % 8] += (weight[j] * x[j]) * level
            p_ll[j % 8] += weight[j] * (level * level)
        sum_xl = _sum_partials(p_xl)
        sum_ll = _sum_partials(p_ll)
        scale = np.float32(0)
        error = sum_xx
        if sum_ll > np.float32(0):
            scale = sum_xl / sum_ll
            error = sum_xx - (sum_xl * sum_xl) / sum_ll
        if error < best_error:
            best_error = error
            best_scale = scale
            best_to_level = to_level
    for j in range(BLOCK):
        levels[j] = _level(x[j], best_to_level)
    return best_scale


@njit(inline="always")
def _row_exponent(row):  # type: ignore[no-untyped-def]
    """2^-e with 2^e the power of two at or below the row's largest magnitude (limited to what float32 holds)."""
    largest = np.float32(0)
    for j in range(row.size):
        largest = max(largest, abs(row[j]))
    exponent = np.int64(np.float32(largest).view(np.uint32) >> np.uint32(23)) - 127
    exponent = min(max(exponent, np.int64(-126)), np.int64(126))
    return np.uint32((127 - exponent) << 23).view(np.float32)


@njit(inline="always")
def _mean_square(row, unit):  # type: ignore[no-untyped-def]
    """The float64 mean of (x · unit)², summed in 8 partials, as float32."""
    partial = np.zeros(8, np.float64)
    for j in range(row.size):
        scaled = np.float64(row[j] * unit)
        partial[j % 8] += scaled * scaled
    return np.float32(_sum_partials(partial) / np.float64(row.size))


@njit(
    void(_ROWS_IN, _CHANNELS_IN, boolean, _UINT8, _SCALES, _FAULTS),
    parallel=True,
    nogil=True,
    cache=True,
    error_model="numpy",
)
def quantize_q4_0_fit(w, importance, scale_f16, q, d, bad_block):  # type: ignore[no-untyped-def]
    """Q4_0 by the 13-candidate fit. ``importance`` float32 [cols], or [0] to weight an element by its own square.

    With an importance, element weights are importance · sqrt(s² + x²) with s² the mean square of the row. x is taken
    in units of the power of two below the row's largest magnitude: that changes no result, since all weights of a
    row share the factor, and it keeps the squares of very small and very large rows inside float32.
    """
    for row in prange(w.shape[0]):
        bad_block[row] = -1
        x = np.empty(BLOCK, np.float32)
        weight = np.empty(BLOCK, np.float32)
        levels = np.empty(BLOCK, np.float32)
        unit = np.float32(0)
        mean_square = np.float32(0)
        if importance.size:
            unit = _row_exponent(w[row])
            mean_square = _mean_square(w[row], unit)
        for b in range(d.shape[1]):
            source = w[row, b * BLOCK : (b + 1) * BLOCK]
            q_block = q[row, b * BLOCK // 2 : (b + 1) * BLOCK // 2]
            largest = _largest(source)
            if abs(largest) == np.float32(np.inf):
                bad_block[row] = b
                break
            if largest == np.float32(0):
                d[row, b] = np.float32(0)
                q_block[:] = np.uint8(0x88)
                continue
            magnitude = np.float32(1)
            if abs(largest) < _TINY_Q4 or abs(largest) > _HUGE_Q4:
                magnitude = abs(largest)
            any_weight = False
            for j in range(BLOCK):
                x[j] = source[j] / magnitude
                if importance.size:
                    scaled = source[j] * unit
                    weight[j] = importance[b * BLOCK + j] * np.sqrt(mean_square + scaled * scaled)
                else:
                    weight[j] = x[j] * x[j]
                any_weight = any_weight or weight[j] > np.float32(0)
            if not any_weight:
                weight[:] = np.float32(1)
            scale = _fit_block(x, weight, largest / magnitude, levels) * magnitude
            stored = _store_q4(scale, levels, scale_f16, q_block)
            if np.isnan(stored):
                bad_block[row] = b
                break
            d[row, b] = stored
