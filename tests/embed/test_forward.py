"""The forward pass against a literal transcription of section 6, and its parts against hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from krafla_cli.embed.activations import gelu, layer_norm, normalized, quantize_activations, softmax
from krafla_cli.embed.forward import BitLinear, Encoder, cut, embedding_rows, groups_of
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
    """A quantizer that gives the transcription's codes for the rows of all texts, q, k and v's being the same."""

    def __init__(self, literals: list[LiteralModel]) -> None:
        self.calls = 0
        self.literals = literals
        self.largest_flip = 0.0

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        layer, place = divmod(self.calls, 4)  # qkv, out, up, down
        self.calls += 1
        at = 6 * layer + (0, 3, 4, 5)[place]
        codes = np.concatenate([m.codes[at] for m in self.literals])
        own, _ = quantize_activations(x)
        self.largest_flip = max(self.largest_flip, float(np.abs(own - codes).max()))
        return codes, np.concatenate([m.x_scales[at] for m in self.literals])


@pytest.mark.parametrize(("embedding", "weights", "n_layers"), COMBINATIONS)
def test_against_the_literal_transcription(embedding: str, weights: str, n_layers: int) -> None:
    """Section 6 at every Matryoshka width: 1e-5, for ternary weights with the transcription's codes replayed."""
    for seed in SEEDS:
        model = random_model(header_of(embedding, weights, n_layers), seed)
        texts = random_ids(seed)
        literals = [LiteralModel(model) for _ in texts]
        expected = [m.projected(ids.tolist()).numpy() for m, ids in zip(literals, texts, strict=True)]
        replay = Replay(literals)
        got = Encoder(model).project(texts, *([replay] if weights == "ternary" else []))
        assert replay.largest_flip <= 1
        for dims in model.header.dims:
            literal = [m.embed(ids.tolist(), dims) for m, ids in zip(literals, texts, strict=True)]
            assert np.abs(cut(got, dims) - np.stack(literal)).max() <= 1e-5
        assert np.allclose(got, np.stack(expected), rtol=0, atol=1e-5 * np.abs(expected).max())


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


def test_texts_do_not_influence_each_other() -> None:
    """A text alone and among others: equal but for the order of the last product's sum."""
    model = random_model(header_of("int4", "ternary"), 7)
    texts = sorted((ids for seed in range(4) for ids in random_ids(seed)), key=len)
    together = Encoder(model).project(texts)
    alone = np.concatenate([Encoder(model).project([ids]) for ids in texts])
    assert np.allclose(together, alone, rtol=0, atol=1e-6)


def test_long_texts_attend_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(header_of("fp32", "fp32"), 3)
    texts = [np.arange(50) % len(VOCAB), np.arange(50)[::-1] % len(VOCAB)]
    whole = Encoder(model).project(texts)
    monkeypatch.setattr("krafla_cli.embed.forward.MAX_SCORES", 1000)
    assert np.allclose(Encoder(model).project(texts), whole, rtol=0, atol=1e-6)


def test_groups() -> None:
    assert [(g.start, g.n_texts, g.n_tokens) for g in groups_of([2, 2, 3, 5, 5])] == [(0, 2, 2), (4, 1, 3), (7, 2, 5)]


# --- the parts, by hand


def test_layer_norm_by_hand() -> None:
    # mean 2, biased variance 2/3
    x = np.array([[1, 2, 3]], np.float32)
    unit = 1 / math.sqrt(2 / 3 + 1e-5)
    assert np.allclose(layer_norm(x), [[-unit, 0, unit]], atol=1e-6)
    scaled = layer_norm(x, np.array([2, 2, 2], np.float32), np.array([1, 1, 1], np.float32))
    assert np.allclose(scaled, [[1 - 2 * unit, 1, 1 + 2 * unit]], atol=1e-6)


def test_activations_are_scaled_by_128_and_clamped_to_127() -> None:
    # LayerNorm of [-1, 0, 1, 0] is +-1.4141 and 0; the largest becomes 128 and is clamped to 127, the smallest is -128.
    codes, x_scale = quantize_activations(np.array([[-1, 0, 1, 0]], np.float32))
    assert codes.tolist() == [[-128, 0, 127, 0]]
    assert x_scale[0, 0] == pytest.approx(128 / 1.41420, rel=1e-4)


def test_constant_rows_hit_the_clamp_and_stay_zero() -> None:
    codes, x_scale = quantize_activations(np.full((1, 4), 3, np.float32))
    assert codes.tolist() == [[0, 0, 0, 0]]
    assert x_scale[0, 0] == np.float32(128) / np.float32(1e-5)


def test_bitlinear_adds_the_bias_before_the_rescale() -> None:
    linear = BitLinear([np.array([[1, 0, -1, 0]], np.int8)], [np.float32(2)], np.array([10], np.float32))
    codes, x_scale = np.array([[100, 5, 20, 7]], np.float32), np.array([[4]], np.float32)
    # (100 - 20 + 10) / (2 * 4)
    assert linear(codes, lambda _: (codes, x_scale)).tolist() == [[11.25]]


def test_joined_matrices_have_their_own_scales() -> None:
    ones = np.ones((2, 4), np.int8)
    linear = BitLinear([ones, -ones], [np.float32(1), np.float32(4)], None)
    codes = np.full((1, 4), 8, np.float32)
    assert linear(codes, lambda _: (codes, np.ones((1, 1), np.float32))).tolist() == [[32, 32, -8, -8]]


def test_products_are_exact_at_the_largest_width() -> None:
    """u16 sizes: 65535 inputs of -128 sum to less than 2^24, where float32 still holds every integer."""
    n = 65535
    rng = np.random.default_rng(0)
    weights = rng.choice(np.array([-1, 1], np.int8), (2, n))
    weights[0] = 1
    codes = rng.integers(-128, 128, (3, n)).astype(np.float32)
    codes[0] = -128
    codes[0, 0] = -127
    exact = codes.astype(np.int64) @ weights.T.astype(np.int64)
    got = BitLinear([weights], [np.float32(1)], None)(codes, lambda _: (codes, np.ones((3, 1), np.float32)))
    assert np.array_equal(got, exact)
    with pytest.raises(ValueError, match="not be exact"):
        BitLinear([np.ones((1, 1 << 17), np.int8)], [np.float32(1)], None)


def test_gelu_is_the_exact_form_to_float32_rounding() -> None:
    x = np.linspace(-12, 12, 20001).astype(np.float32)
    exact = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64).tolist()])
    assert np.abs(gelu(x.copy()) - exact).max() <= 3e-7
    small = np.abs(x) < 1
    assert np.abs(gelu(x.copy()) - exact)[small].max() <= 8e-8
    tanh_form = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert np.abs(tanh_form - exact).max() > 1e-4


def test_gelu_far_out() -> None:
    x = np.array([-1e30, -1e4, -0.0, 0.0, 1e4, 1e30], np.float32)
    assert np.abs(gelu(x.copy()) - np.maximum(x, 0)).max() <= 1e-3
    assert gelu(np.array([-1e4], np.float32))[0] == pytest.approx(0, abs=1e-20)


def test_softmax_of_large_scores() -> None:
    assert softmax(np.array([[1000.0, 1000.0], [-1000.0, 0.0]], np.float32)).tolist() == [[0.5, 0.5], [0.0, 1.0]]


def test_normalized_keeps_zero_and_extreme_rows() -> None:
    rows = np.array([[0, 0], [3e-30, 4e-30], [3e30, 4e30], [3, 4]], np.float32)
    assert np.allclose(normalized(rows), [[0, 0], [0.6, 0.8], [0.6, 0.8], [0.6, 0.8]], atol=1e-7)
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(normalized(np.array([[np.nan, 1], [np.inf, -np.inf]], np.float32))).any()


def test_embedding_rows_by_hand() -> None:
    model = random_model(header_of("ternary", n_layers=0))
    rows = embedding_rows(model, np.array([3, 0]))
    literal = LiteralModel(model).embedding_lookup([3, 0]).numpy()
    assert np.array_equal(rows, literal)
