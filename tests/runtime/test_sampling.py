"""Choosing tokens, against hand-computed sets and against transformers' processors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from krafla_cli.errors import DataError, UsageError
from krafla_cli.runtime.sampling import Sampler, SamplingOptions, resolve


def _logits(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, np.float32))


def _kept(logits: np.ndarray, **options: float) -> dict[int, float]:
    sampler = Sampler(SamplingOptions(**{"temperature": 1.0, **options}), seed=0)
    ids, weights = sampler.candidates(logits.astype(np.float64))
    return dict(zip(ids.tolist(), (weights / weights.sum()).round(6).tolist(), strict=True))


def test_greedy_takes_the_first_of_equals() -> None:
    assert Sampler(SamplingOptions()).choose(np.array([1, 3, 3, 2], np.float32)) == 1


def test_top_k_keeps_the_likeliest_and_of_equals_the_lower_id() -> None:
    assert list(_kept(_logits(0.1, 0.3, 0.2, 0.2, 0.2), top_k=2)) == [1, 2]
    assert list(_kept(_logits(0.5, 0.5), top_k=9)) == [0, 1]


def test_top_p_keeps_the_token_that_crosses() -> None:
    assert list(_kept(_logits(0.1, 0.5, 0.4), top_p=0.49)) == [1]
    assert list(_kept(_logits(0.1, 0.5, 0.4), top_p=0.51)) == [1, 2]
    assert list(_kept(_logits(0.1, 0.5, 0.4), top_p=0.95)) == [1, 2, 0]


def test_top_p_counts_what_top_k_left() -> None:
    # Of 0.5, 0.3 (top 2 of 3) the first has 0.625.
    assert list(_kept(_logits(0.2, 0.5, 0.3), top_k=2, top_p=0.6)) == [1]


def test_min_p_is_a_share_of_the_likeliest() -> None:
    assert list(_kept(_logits(0.04, 0.5, 0.36, 0.1), min_p=0.19)) == [1, 2, 3]
    assert list(_kept(_logits(0.04, 0.5, 0.36, 0.1), min_p=0.3)) == [1, 2]


def test_temperature_sharpens() -> None:
    assert _kept(_logits(0.25, 0.75), temperature=0.5) == {1: 0.9, 0: 0.1}


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    sampler = Sampler(SamplingOptions(repetition_penalty=2.0))
    assert sampler.choose(np.array([3.0, 2.0, -9.0], np.float32), [0, 0, 0]) == 1  # 1.5 < 2, once: not 0.375
    assert sampler.choose(np.array([-1.0, -1.5], np.float32), [0]) == 1


def test_a_seed_repeats_and_frequencies_follow_the_probabilities() -> None:
    logits = _logits(0.2, 0.5, 0.3)
    options = SamplingOptions(temperature=1.0)
    draws = [[s.choose(logits) for _ in range(2000)] for s in (Sampler(options, 7), Sampler(options, 7))]
    assert draws[0] == draws[1]
    shares = np.bincount(draws[0], minlength=3) / 2000
    assert np.abs(shares - [0.2, 0.5, 0.3]).max() < 4 * math.sqrt(0.25 / 2000)


def test_without_a_seed_a_run_can_still_be_repeated() -> None:
    options = SamplingOptions(temperature=1.0)
    logits = np.zeros(1000, np.float32)
    first = Sampler(options)
    again = Sampler(options, first.seed)
    assert [first.choose(logits) for _ in range(5)] == [again.choose(logits) for _ in range(5)]


@pytest.mark.parametrize("seed", range(20))
def test_same_distribution_as_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (4 * rng.standard_normal(300)).astype(np.float32)
    seen = rng.integers(0, 300, 20)
    t, k, top_p, min_p, penalty = (
        rng.uniform(0.3, 2),
        1 + int(rng.integers(200)),
        *rng.uniform([0.3, 0, 1], [1, 0.2, 2]),
    )
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(penalty),
            TemperatureLogitsWarper(t),
            TopKLogitsWarper(k),
            TopPLogitsWarper(top_p),
            MinPLogitsWarper(min_p),
        ]
    )
    want = processors(torch.from_numpy(seen)[None], torch.from_numpy(logits)[None].double())[0].softmax(0).numpy()
    sampler = Sampler(SamplingOptions(t, k, top_p, min_p, penalty), seed=0)
    ids, weights = sampler.candidates(sampler._penalized(logits.astype(np.float64), seen.tolist()))
    got = np.zeros(300)
    got[ids] = weights / weights.sum()
    np.testing.assert_allclose(got, want, atol=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error(bad: float) -> None:
    with pytest.raises(DataError, match="logits are broken"):
        Sampler(SamplingOptions()).choose(np.array([0.0, bad], np.float32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name} must be .*, is {value:g}"):
        SamplingOptions(**{name: value})


def test_resolve() -> None:
    model = {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95}
    assert resolve(model, {}) == SamplingOptions(0.6, 20, 0.95)
    assert resolve(model, {"temperature": 0.0}).is_greedy
    assert resolve({}, {}).is_greedy
    assert resolve({}, {"top_p": 0.9}) == SamplingOptions(1.0, 0, 0.9)
    assert resolve({"top_k": 40.0}, {}) == SamplingOptions(1.0, 40)
    assert resolve({"temperature": 0.0}, {"top_k": 5}) == SamplingOptions(1.0, 5)
    assert resolve({"repetition_penalty": 1.1}, {}) == SamplingOptions(repetition_penalty=1.1)
    with pytest.raises(UsageError, match=r"top_k must be a whole number >= 0, is 2.5"):
        resolve({"top_k": 2.5}, {})
