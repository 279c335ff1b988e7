"""RoPE: the row permutation by hand, and frequencies against transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from krafla_cli.formats.mlb import ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN, Header
from krafla_cli.rope import attention_factor, interleaved_order, inverse_frequencies, rotate_half_order

BASE = Header(dim=64, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=32, vocab=3, max_seq=8, rope_theta=10000.0)


@pytest.mark.parametrize(
    ("n_heads", "head_dim", "rot_dim", "order"),
    [
        (1, 4, 4, [0, 2, 1, 3]),
        (1, 8, 8, [0, 4, 1, 5, 2, 6, 3, 7]),
        (2, 4, 4, [0, 2, 1, 3, 4, 6, 5, 7]),
        (1, 8, 4, [0, 2, 1, 3, 4, 5, 6, 7]),
        (2, 6, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (1, 6, 6, [0, 3, 1, 4, 2, 5]),
    ],
)
def test_order(n_heads: int, head_dim: int, rot_dim: int, order: list[int]) -> None:
    assert list(interleaved_order(n_heads, head_dim, rot_dim)) == order
    there_and_back = interleaved_order(n_heads, head_dim, rot_dim)[rotate_half_order(n_heads, head_dim, rot_dim)]
    assert list(there_and_back) == list(range(n_heads * head_dim))


def test_plain_by_hand() -> None:
    header = replace(BASE, head_dim=4, rope_theta=100.0)
    assert list(inverse_frequencies(header)) == [1.0, 100.0**-0.5]
    partial = replace(header, rot_dim=2)
    assert list(inverse_frequencies(partial)) == [1.0]


def transformers_frequencies(head_dim: int, **parameters: Any) -> tuple[np.ndarray, float]:
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=256, rope_parameters=parameters)
    inv, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    return inv.double().numpy(), factor


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_llama3_equals_transformers(head_dim: int, theta: float) -> None:
    want, _ = transformers_frequencies(
        head_dim,
        rope_type="llama3",
        rope_theta=theta,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    header = replace(
        BASE,
        head_dim=head_dim,
        rope_theta=theta,
        rope_type=ROPE_LLAMA3,
        rope_factor=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_orig_max_seq=64,
    )
    np.testing.assert_allclose(inverse_frequencies(header), want, rtol=2e-6)


def test_llama3_shows_all_three_bands() -> None:
    header = replace(
        BASE,
        head_dim=16,
        rope_type=ROPE_LLAMA3,
        rope_factor=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_orig_max_seq=64,
    )
    plain = inverse_frequencies(replace(header, rope_type=0))
    ratio = inverse_frequencies(header) / plain
    assert ratio[0] == 1  # wavelength 6.3 < 64 / 4
    assert 1 / 8 < ratio[1] < 1  # 19.9, between
    assert list(ratio[3:]) == [1 / 8] * 5  # > 64


def test_linear_divides_every_frequency() -> None:
    header = replace(BASE, head_dim=16, rope_type=ROPE_LINEAR, rope_factor=4.0)
    plain = inverse_frequencies(replace(header, rope_type=0))
    assert list(inverse_frequencies(header) * 4) == list(plain)


@pytest.mark.parametrize("betas", [(32.0, 1.0), (16.0, 2.0), (1.5, 1.4)])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_yarn_equals_transformers(head_dim: int, betas: tuple[float, float]) -> None:
    want, factor = transformers_frequencies(
        head_dim,
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=betas[0],
        beta_slow=betas[1],
    )
    header = replace(
        BASE,
        head_dim=head_dim,
        rope_type=ROPE_YARN,
        rope_factor=4.0,
        rope_low_freq_factor=betas[0],
        rope_high_freq_factor=betas[1],
        rope_orig_max_seq=64,
        rope_attn_factor=0.1 * math.log(4.0) + 1,
    )
    np.testing.assert_allclose(inverse_frequencies(header), want, rtol=2e-6)
    assert attention_factor(header) == pytest.approx(factor)


def test_yarn_with_equal_bounds() -> None:
    # Both bounds are clipped to 0: transformers adds 0.001 to the upper one.
    want, _ = transformers_frequencies(
        16, rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=4
    )
    header = replace(
        BASE,
        head_dim=16,
        rope_type=ROPE_YARN,
        rope_factor=4.0,
        rope_low_freq_factor=32.0,
        rope_high_freq_factor=1.0,
        rope_orig_max_seq=4,
        rope_attn_factor=1.0,
    )
    np.testing.assert_allclose(inverse_frequencies(header), want, rtol=2e-6)


def test_local_layers_are_not_scaled() -> None:
    header = replace(
        BASE, head_dim=16, rope_type=ROPE_LINEAR, rope_factor=8.0, rope_local_theta=1000.0, rope_attn_factor=0.0
    )
    local = inverse_frequencies(header, local=True)
    np.testing.assert_allclose(local, 1000.0 ** (-np.arange(8) / 8), rtol=1e-15)
    assert attention_factor(replace(header, rope_type=ROPE_YARN, rope_attn_factor=1.5), local=True) == 1.0
