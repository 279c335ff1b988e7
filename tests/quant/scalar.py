"""The quantization rules of the .mlb specification in scalar float32 Python, one operation at a time.

Written from the specification's text, without a look at the kernels: what these give, bit for bit, is right.
int() truncates. Where the specification leaves the order of float32 sums open: element j goes to partial j mod 8, and
the partials are added ((0+4)+(2+6)) + ((1+5)+(3+7)); products are (w·x)·L, w·(L·L) and w·(x·x).
"""

from __future__ import annotations

import math

import numpy as np

F = np.float32
CANDIDATES = [F(-6.0), F(-6.2), F(-6.4), F(-6.6), F(-6.8), F(-7.0), F(-7.2), F(-7.4), F(-7.6), F(-7.8)]
CANDIDATES += [F(-8.0), F(-8.2), F(-8.4)]


class CannotStoreError(Exception):
    """A scale above 65504 in f16, or a weight that is not finite."""


def check_finite(block):
    if not all(math.isfinite(x) for x in block):
        raise CannotStoreError


def stored_scale(d, scale_f16):
    """The scale as the runtime reads it, float32."""
    if not scale_f16:
        return d
    if abs(d) > F(65504):
        raise CannotStoreError
    return F(np.float16(d))


def q8_0_block(block, scale_f16):
    """(32 quants, scale as float32)."""
    check_finite(block)
    amax = max(abs(x) for x in block)
    if amax < F(1e-30):
        return [0] * 32, F(0)
    d = amax / F(127)
    inverse = F(127) / amax
    if scale_f16:
        d = stored_scale(d, True)
        if d == 0:
            return [0] * 32, F(0)
        inverse = F(1) / d
    quants = [int(x * inverse + F(math.copysign(0.5, x))) for x in block]
    return [max(-127, min(127, q)) for q in quants], d


def pack_nibbles(levels):
    return [(levels[j] + 8) | (levels[j + 16] + 8) << 4 for j in range(16)]


def first_largest(block):
    largest = block[0]
    for x in block:
        if abs(x) > abs(largest):
            largest = x
    return largest


def q4_0_round_block(block, scale_f16):
    """(16 bytes, scale as float32)."""
    check_finite(block)
    d = first_largest(block) / F(-8)
    if d == 0 or not math.isfinite(F(1) / d):
        return [0x88] * 16, F(0)
    inverse = F(1) / d
    levels = [min(15, int(x * inverse + F(8.5))) - 8 for x in block]
    d = stored_scale(d, scale_f16)
    if d == 0:
        return [0x88] * 16, F(0)
    return pack_nibbles(levels), d


def in_order(terms):
    partial = [type(terms[0])(0)] * 8
    for j, term in enumerate(terms):
        partial[j % 8] = partial[j % 8] + term
    p = partial
    return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))


def level_of(x, factor):
    return F(max(-8, min(7, int(np.rint(x * factor)))))


def q4_0_fit_block(block, scale_f16, weights=None):
    """(16 bytes, scale as float32). ``weights`` of the elements, or None for the squares."""
    check_finite(block)
    amax = abs(first_largest(block))
    if amax == 0:
        return [0x88] * 16, F(0)
    unit = amax if amax < F(1e-6) or amax > F(1e6) else F(1)
    xs = [x / unit for x in block]
    ws = [x * x for x in xs] if weights is None else weights
    if all(w == 0 for w in ws):
        ws = [F(1)] * 32
    sum_xx = in_order([w * (x * x) for w, x in zip(ws, xs, strict=True)])
    best = None
    for candidate in CANDIDATES:
        factor = candidate / first_largest(xs)
        levels = [level_of(x, factor) for x in xs]
        sum_xl = in_order([(w * x) * level for w, x, level in zip(ws, xs, levels, strict=True)])
        sum_ll = in_order([w * (level * level) for w, level in zip(ws, levels, strict=True)])
        d, error = F(0), sum_xx
        if sum_ll > 0:
            d, error = sum_xl / sum_ll, sum_xx - (sum_xl * sum_xl) / sum_ll
        if best is None or error < best[0]:
            best = error, d, levels
    _, d, levels = best
    d = stored_scale(d * unit, scale_f16)
    if d == 0:
        return [0x88] * 16, F(0)
    return pack_nibbles([int(level) for level in levels]), d


def importance_weights(row, importance):
    """imp x sqrt(s² + x²) of every element of a row, s² the mean x² of the row.

    x is first divided by the power of two at or below the row's largest magnitude (within float32's normal range):
    a common factor of the weights changes nothing, but the squares must not overflow or underflow.
    """
    amax = max(abs(x) for x in row)
    exponent = -126 if amax == 0 else max(-126, min(126, math.frexp(float(amax))[1] - 1))
    scaled = [F(math.ldexp(float(x), -exponent)) for x in row]
    mean = F(in_order([float(x) * float(x) for x in scaled]) / len(row))
    return [imp * np.sqrt(mean + x * x) for imp, x in zip(importance, scaled, strict=True)]


def quantize_rows(w, encoding, scale_f16, rule="fit", importance=None):
    """(q, d) of float32 rows as nested lists: what the file holds, d as float32."""
    q_rows, d_rows = [], []
    with np.errstate(all="ignore"):
        for row in w:
            weights = importance_weights(row, importance) if importance is not None else None
            q_row, d_row = [], []
            for start in range(0, len(row), 32):
                block = list(row[start : start + 32])
                if encoding == "q8_0":
                    q, d = q8_0_block(block, scale_f16)
                elif rule == "round":
                    q, d = q4_0_round_block(block, scale_f16)
                else:
                    q, d = q4_0_fit_block(block, scale_f16, weights and weights[start : start + 32])
                q_row += q
                d_row.append(d)
            q_rows.append(q_row)
            d_rows.append(d_row)
    return q_rows, d_rows
