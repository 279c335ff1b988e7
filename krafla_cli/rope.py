"""Rotary position embedding: frequencies with every scaling, and the row permutation between the two layouts.

The one place for it: convert, export and both engines use these functions. Source: the .mlb specification, "RoPE".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from krafla_cli.formats.mlb import ROPE_LINEAR, ROPE_LLAMA3, ROPE_PLAIN, ROPE_YARN, Header

Float64s = npt.NDArray[np.float64]


_MAX_THETA = 1e15  # of llama3 scaling: beyond, its lowest frequencies are lost in rounding


def inverse_frequencies(header: Header, local: bool = False) -> Float64s:
    """Radians per position of each rotated pair, [rot_size / 2], float64.

    ``local``: of the layers that use rope_local_theta, which no scaling touches. The exponent counts in rotated
    dimensions: with rot_dim set, it takes the place of head_dim.
    """
    dim = header.rot_size
    theta = header.rope_local_theta if local else header.rope_theta
    inv = theta ** (-2.0 * np.arange(dim // 2, dtype=np.float64) / dim)
    rope_type = ROPE_PLAIN if local else header.rope_type
    if rope_type == ROPE_LLAMA3:
        return _llama3(inv, header)
    if rope_type == ROPE_LINEAR:
        return inv / header.rope_factor
    if rope_type == ROPE_YARN:
        return _yarn(inv, header)
    return inv


def attention_factor(header: Header, local: bool = False) -> float:
    """Factor on cos and sin: rope_attn_factor with yarn, on layers that are not local; else 1."""
    return header.rope_attn_factor if header.rope_type == ROPE_YARN and not local else 1.0


def rotation_tables(
    header: Header, n_positions: int, local: bool = False
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin of every position and pair, times the attention factor; float32 [n_positions, rot_size / 2] each.

    Angles are float64 up to the last rounding, so that far positions lose nothing.
    """
    angles = np.arange(n_positions, dtype=np.float64)[:, None] * inverse_frequencies(header, local)
    factor = attention_factor(header, local)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def _llama3(inv: Float64s, header: Header) -> Float64s:
    return _llama3_scaled(
        inv,
        Llama3(header.rope_factor, header.rope_low_freq_factor, header.rope_high_freq_factor, header.rope_orig_max_seq),
    )


class Llama3(NamedTuple):
    """The parameters of llama3 scaling."""

    factor: float
    low: float
    high: float
    original: float


def _llama3_scaled(inv: Float64s, parameters: Llama3) -> Float64s:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    factor, low, high, original = parameters
    wavelength = 2 * math.pi / inv
    blend = (original / wavelength - low) / (high - low)
    between = (1 - blend) * inv / factor + blend * inv
    scaled = np.where(wavelength > original / low, inv / factor, between)
    return np.where(wavelength < original / high, inv, scaled)


def llama3_divisors(header: Header) -> Float64s:
    """What llama3 scaling divides each pair's frequency by, [rot_size / 2]: what GGUF stores in its place."""
    plain = header.rope_theta ** (-2.0 * np.arange(header.rot_size // 2, dtype=np.float64) / header.rot_size)
    return plain / _llama3(plain, header)


def llama3_of_divisors(divisors: Float64s, theta: float, dim: int, hints: Sequence[Llama3] = ()) -> Llama3 | None:
    """The parameters of llama3 scaling that give ``divisors`` (float32 precision); None where there are none.

    Only the ratios of low, high and original count, so low is taken as 1. Tried are ``hints``, what a fit of the
    blended pairs gives, and the usual high = 4 with what one blended pair, or none, leaves open.
    """
    factor = float(np.max(divisors))
    if not math.isfinite(factor) or factor <= 1 or not 1 < theta <= _MAX_THETA:
        return None
    inv = theta ** (-2.0 * np.arange(dim // 2, dtype=np.float64) / dim)
    factor = round(factor, 4) if math.isclose(factor, round(factor, 4), rel_tol=1e-6) else factor
    for candidate in (*hints, *_fitted(divisors, inv, factor)):
        low, high = candidate.low, candidate.high
        if candidate.factor > 1 and 0 < low < high and candidate.original > 0:
            given = inv / _llama3_scaled(inv, candidate)
            if np.allclose(given, divisors, rtol=2e-6, atol=0):
                return candidate
    return None


def _fitted(divisors: Float64s, inv: Float64s, factor: float) -> list[Llama3]:
    """Parameters to try: the blend of the pairs between kept and divided ones is a line over 1 / wavelength."""
    between = (divisors > 1 + 1e-6) & (divisors < factor * (1 - 1e-6))
    per_position = inv[between] / (2 * math.pi)
    blend = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    if between.sum() == 0:
        return [Llama3(factor, 1.0, 4.0, float(1 << n)) for n in range(4, 21)]
    if between.sum() == 1:
        return [Llama3(factor, 1.0, 4.0, float(round((3 * blend[0] + 1) / per_position[0])))]
    slope, intercept = np.polyfit(per_position, blend, 1)
    if intercept >= 0:
        return []
    width = float(-1 / intercept)  # high - low, with low = 1
    return [Llama3(factor, 1.0, 1 + round(width, digits), float(round(slope * width))) for digits in (1, 3, 6)]


def _yarn(inv: Float64s, header: Header) -> Float64s:
    """Pairs are blended by how often their wavelength fits the original context."""
    low, high = yarn_bounds(
        header.rot_size,
        header.rope_theta,
        header.rope_orig_max_seq,
        beta_fast=header.rope_low_freq_factor,
        beta_slow=header.rope_high_freq_factor,
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), header.rot_size - 1)
    # Equal bounds would divide by zero; transformers adds the same 0.001.
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(len(inv), dtype=np.float64) - low) / width, 0.0, 1.0)
    return inv / header.rope_factor * ramp + inv * (1 - ramp)


def yarn_bounds(dim: int, theta: float, original: int, beta_fast: float, beta_slow: float) -> tuple[float, float]:
    """The dimensions at which a wavelength fits ``beta_fast`` and ``beta_slow`` rotations into ``original`` positions.

    Not yet rounded: the format rounds them outwards (floor, ceil), as transformers does with ``truncate``.
    """

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    return dimension(beta_fast), dimension(beta_slow)


def interleaved_order(n_heads: int, head_dim: int, rot_dim: int) -> npt.NDArray[np.intp]:
    """Row order that turns a rotate-half projection into the interleaved one: new[i] = old[order[i]].

    Within each head, row i of the first half of the ``rot_dim`` rotated rows goes to 2i, row i + rot_dim / 2 to
    2i + 1; rows from rot_dim on stay. [n_heads x head_dim]
    """
    order = np.arange(head_dim)
    half = rot_dim // 2
    order[0:rot_dim:2] = np.arange(half)
    order[1:rot_dim:2] = np.arange(half) + half
    return (np.arange(n_heads)[:, None] * head_dim + order).reshape(-1)


def rotate_half_order(n_heads: int, head_dim: int, rot_dim: int) -> npt.NDArray[np.intp]:
    """The inverse of :func:`interleaved_order`: from the interleaved layout back to rotate-half."""
    return np.argsort(interleaved_order(n_heads, head_dim, rot_dim))
