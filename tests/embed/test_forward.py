"""The forward pass against a literal transcription of section 6; batches; texts alone and among others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from krafla_cli.embed.forward import Encoder, Runner, cut, normalized
from krafla_cli.formats.lemb_layout import Header
from tests.embed.literal import LiteralModel
from tests.embed.students import VOCAB, header_of, random_model

SEEDS = range(100, 120)
COMBINATIONS = [
    (e, w, n) for e in ("fp32", "int8", "int4", "ternary") for w, n in (("fp32", 0), ("fp32", 2), ("ternary", 2))
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_ids(seed: int, n_texts: int = 3) -> list[np.ndarray]:
    """Token ids without padding, sorted by length, two of them equally long."""
    rng = np.random.default_rng(seed)
    lengths = sorted([*rng.integers(1, 12, n_texts - 1), 5])
    return [rng.integers(1, len(VOCAB), n) for n in lengths]


class Replay:
    """Puts the transcription's codes in the place of the kernels' for the rows of all texts; q, k and v's are one."""

    def __init__(self, literals: list[LiteralModel]) -> None:
        self.calls = 0
        self.literals = literals
        self.largest_flip = 0

    def __call__(self, codes: np.ndarray, x_scale: np.ndarray) -> None:
        layer, place = divmod(self.calls, 4)  # qkv, out, up, down
        self.calls += 1
        at = 6 * layer + (0, 3, 4, 5)[place]
        literal = np.concatenate([m.codes[at] for m in self.literals]).astype(int) + 128
        self.largest_flip = max(self.largest_flip, int(np.abs(codes - literal).max()))
        codes[:] = literal
        x_scale[:] = np.concatenate([m.x_scales[at] for m in self.literals])[:, 0]


@pytest.mark.parametrize(("embedding", "weights", "n_layers"), COMBINATIONS)
def test_against_the_literal_transcription(embedding: str, weights: str, n_layers: int) -> None:
    """Section 6 at every Matryoshka width: 1e-5, for ternary weights with the transcription's codes replayed."""
    for seed in SEEDS:
        model = random_model(header_of(embedding, weights, n_layers), seed)
        texts = random_ids(seed)
        literals = [LiteralModel(model) for _ in texts]
        expected = [m.projected(ids.tolist()).numpy() for m, ids in zip(literals, texts, strict=True)]
        replay = Replay(literals)
        got = Encoder(model).project(texts, replay)
        assert replay.calls == (4 * n_layers if weights == "ternary" else 0)
        assert replay.largest_flip <= 1
        for dims in model.header.dims:
            literal = [m.embed(ids.tolist(), dims) for m, ids in zip(literals, texts, strict=True)]
            assert np.abs(cut(got, dims) - np.stack(literal)).max() <= 1e-5
        assert np.allclose(got, np.stack(expected), rtol=0, atol=1e-5 * np.abs(expected).max())


ODD_SHAPES: list[dict[str, Any]] = [
    {"d_model": 4, "n_heads": 1, "ffn_dim": 4, "output_dim": 1, "n_matryoshka": 0, "matryoshka_dims": (0,) * 8},
    {"d_model": 4, "n_heads": 4, "ffn_dim": 8},
    {"d_model": 12, "n_heads": 3, "ffn_dim": 20, "output_dim": 33},
    {"d_model": 36, "n_heads": 2, "ffn_dim": 100, "output_dim": 17},
    {"d_model": 44, "n_heads": 1, "ffn_dim": 260, "output_dim": 40},
    {"d_model": 96, "n_heads": 2, "ffn_dim": 516, "output_dim": 96},
]


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=lambda s: f"d{s['d_model']}-h{s['n_heads']}-f{s['ffn_dim']}")
@pytest.mark.parametrize("weights", ["fp32", "ternary"])
def test_shapes_that_do_not_fill_vectors(shape: dict[str, Any], weights: str) -> None:
    for embedding in ("fp32", "int8", "int4", "ternary"):
        model = random_model(header_of(embedding, weights, **shape), 5)
        texts = [*random_ids(5, 5), 1 + np.arange(35) % (len(VOCAB) - 1)]
        literals = [LiteralModel(model) for _ in texts]
        expected = np.stack([m.projected(ids.tolist()).numpy() for m, ids in zip(literals, texts, strict=True)])
        got = Encoder(model).project(texts, Replay(literals))
        assert np.allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_ffn_of_odd_width_with_fp32_weights() -> None:
    model = random_model(header_of("fp32", "fp32", ffn_dim=13), 5)
    texts = random_ids(5)
    expected = np.stack([LiteralModel(model).projected(ids.tolist()).numpy() for ids in texts])
    assert np.allclose(Encoder(model).project(texts), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def free_running_cosines(header: Header, seeds: range) -> np.ndarray:
    """Cosines at full width between free runs of both, each rounding its own activations."""
    cosines = []
    for seed in seeds:
        model, texts = random_model(header, seed), random_ids(seed)
        literal = [LiteralModel(model).embed(ids.tolist(), header.output_dim) for ids in texts]
        cosines.append((cut(Encoder(model).project(texts), header.output_dim) * np.stack(literal)).sum(axis=1))
    return np.concatenate(cosines)


def test_free_running_at_the_specifications_shape() -> None:
    header = header_of(
        "int4", "ternary", 2, d_model=256, n_heads=4, ffn_dim=1024, output_dim=384, matryoshka_dims=(64, 128, *[0] * 6)
    )
    assert free_running_cosines(header, range(100, 101)).min() >= 1 - 1e-5


def test_free_running_at_tiny_sizes() -> None:
    """A last bit can flip one code, which at 16 channels moves a vector by up to some 1e-5: rare, and never more."""
    cosines = np.concatenate(
        [free_running_cosines(header_of(e, "ternary"), SEEDS) for e in ("fp32", "int8", "int4", "ternary")]
    )
    assert (cosines < 1 - 1e-5).mean() <= 0.02
    assert cosines.min() >= 1 - 1e-3


@pytest.mark.parametrize("weights", ["fp32", "ternary"])
def test_a_text_has_the_same_bits_alone_and_among_others(weights: str) -> None:
    model = random_model(header_of("int4", weights), 7)
    texts = [ids for seed in range(4) for ids in random_ids(seed)]
    together = Encoder(model).project(texts)
    assert np.array_equal(together, np.concatenate([Encoder(model).project([ids]) for ids in texts]))
    assert np.array_equal(together[::-1], Encoder(model).project(texts[::-1]))


def test_a_runner_is_used_again() -> None:
    """What a larger batch leaves behind does not touch a smaller one; a batch that is too large is refused."""
    model = random_model(header_of("int4", "ternary"), 7)
    encoder = Encoder(model)
    runner = Runner(encoder, 40)
    long, short = np.arange(40) % len(VOCAB), np.arange(3)
    runner.run(long, np.array([0, 40]))
    assert np.array_equal(runner.run(short, np.array([0, 3])), encoder.project([short]))
    with pytest.raises(ValueError, match="41 tokens, there is room for 40"):
        runner.run(np.zeros(41, np.int64), np.array([0, 41]))


@pytest.mark.parametrize("value", [np.float32(3e38), np.float32(1e25)])
@pytest.mark.parametrize("name", ["layers.0.attn.q.weight", "layers.0.attn.v.weight", "layers.0.ffn.up.weight"])
def test_what_overflows_stays_not_finite(name: str, value: np.float32) -> None:
    """A score, a hidden value or a sum beyond float32 must not become a vector that looks right."""
    model = random_model(header_of("fp32", "fp32", 1), 3)
    arrays = {**model.arrays, name: np.full_like(model.arrays[name], value) * np.sign(model.arrays[name])}
    broken = type(model)(model.header, model.vocab, model.tokenizer, arrays)
    literal = LiteralModel(broken).projected([5, 6, 7]).numpy()
    got = Encoder(broken).project([np.array([5, 6, 7])])[0]
    assert np.isfinite(got).all() == np.isfinite(literal).all()


def test_normalized_keeps_zero_and_extreme_rows() -> None:
    rows = np.array([[0, 0], [3e-30, 4e-30], [3e30, 4e30], [3, 4]], np.float32)
    assert np.allclose(normalized(rows), [[0, 0], [0.6, 0.8], [0.6, 0.8], [0.6, 0.8]], atol=1e-7)
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(normalized(np.array([[np.nan, 1], [np.inf, -np.inf]], np.float32))).any()
