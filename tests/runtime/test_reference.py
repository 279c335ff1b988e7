"""The reference engine against transformers on the same dequantized weights, family by family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from krafla_cli.errors import DataError, UsageError
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.progress import SILENT
from krafla_cli.quant.blocks import Quantized
from krafla_cli.quant.matrix import dequantize
from krafla_cli.quant.q8_0 import quantize_activations
from krafla_cli.runtime import engines
from krafla_cli.runtime.engine import EngineOptions
from krafla_cli.runtime.reference import ReferenceEngine, open_engine
from krafla_cli.runtime.reference_weights import BlockMatrix, Codes
from krafla_cli.runtime.weights import DenseWeights
from tests.helpers.models import HEADERS, random_arrays, random_model, tiny, write_model
from tests.helpers.twins import FAMILIES, transformers_model, write_twin

N_IDS = 40  # longer than every window
IDS = np.random.default_rng(11).integers(0, 101, N_IDS)


def _engine(path: Path, n_ctx: int = 256, **options: str):
    return open_engine(open_mlb(path), EngineOptions(n_ctx, **options), SILENT)


def _close(got, want) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers(name: str, seed: int, tmp_path: Path) -> None:
    model = transformers_model(FAMILIES[name], seed)
    write_twin(tmp_path / "m.mlb", FAMILIES[name], model, wtype=1 + seed % 2, scale_f16=seed % 2)
    ids = np.random.default_rng(seed).integers(0, 101, N_IDS)
    with torch.no_grad():
        want = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    engine = _engine(tmp_path / "m.mlb")
    _close(engine.forward(ids, "all"), want)

    engine.reset()
    parts = [engine.forward(part, "all") for part in np.split(ids, [1, 8, 25])]
    _close(np.concatenate(parts), want)

    engine.reset()
    engine.forward(ids[:20], "none")
    steps = [engine.forward([i]) for i in ids[20:]]
    _close(np.concatenate(steps), want[20:])


# ---------------------------------------------------------------------------------------------------------------------
# Quantized activations, the cache, and going back


def test_a_product_of_codes_is_exact_within_blocks(tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb", tiny(wtype=2, q8_mask=32))
    model = open_mlb(tmp_path / "m.mlb")
    rng = np.random.default_rng(0)
    for name in ("layers.0.w2", "layers.0.w1"):  # Q4_0, Q8_0
        array = model.quantized(name)
        rows, cols = array.shape
        codes = quantize_activations(rng.standard_normal((5, cols)).astype(np.float32))
        got = BlockMatrix(array, torch.device("cpu")).product(Codes.of(codes.q, codes.d, torch.device("cpu")))
        w = dequantize(array.q, array.d, array.encoding, rows, cols).astype(np.float64)
        x = codes.q * np.repeat(codes.d, 32, axis=1).astype(np.float64)
        np.testing.assert_allclose(got.numpy(), x @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HEADERS)
def test_quantized_activations_stay_near_and_do_not_depend_on_batches(name: str, tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb", HEADERS[name])
    exact = _engine(tmp_path / "m.mlb").forward(IDS, "all")
    engine = _engine(tmp_path / "m.mlb", activations="q8")
    whole = engine.forward(IDS, "all")
    assert np.abs(whole - exact).max() < 0.25 * np.abs(exact).max()
    assert np.abs(whole - exact).mean() < 0.05 * np.abs(exact).max()
    engine.reset()
    parts = [engine.forward(part, "all") for part in np.split(IDS, [1, 20])]
    assert np.abs(np.concatenate(parts) - whole).mean() < 0.05 * np.abs(exact).max()


def test_the_activation_quantizer_can_be_replaced(tmp_path: Path) -> None:
    """What replaying another engine's codes needs: recorded codes, given back, give the same logits."""
    random_model(tmp_path / "m.mlb", HEADERS["hybrid"])
    engine = _engine(tmp_path / "m.mlb", activations="q8")
    recorded = []

    def record(layer: int | None, slot: str, x: np.ndarray) -> Quantized:
        recorded.append((layer, slot, quantize_activations(x)))
        return recorded[-1][2]

    engine.quantize_inputs = record
    logits = engine.forward(IDS, "all")
    replayed = iter(recorded)

    def replay(layer: int | None, slot: str, x: np.ndarray) -> Quantized:
        at, name, codes = next(replayed)
        assert (at, name) == (layer, slot)
        return codes

    engine.reset()
    engine.quantize_inputs = replay
    np.testing.assert_array_equal(engine.forward(IDS, "all"), logits)


def test_a_broken_activation_names_the_place(tmp_path: Path) -> None:
    arrays = random_arrays(HEADERS["plain"])
    arrays["layers.1.ffn_norm"][5] = np.nan
    write_model(tmp_path / "m.mlb", HEADERS["plain"], arrays)
    with pytest.raises(DataError, match=r"layer 1, ffn_in: channel 5 of an activation is NaN"):
        _engine(tmp_path / "m.mlb", activations="q8").forward(IDS)


def test_an_f16_cache_rounds_keys_and_values(tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb", tiny())
    f32, f16 = (_engine(tmp_path / "m.mlb", kv=kv).forward(IDS, "all") for kv in ("f32", "f16"))
    assert 0 < np.abs(f16 - f32).max() < 0.02 * np.abs(f32).max()


def test_truncating_is_like_never_having_run(tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb", HEADERS["gemma3"])
    engine = _engine(tmp_path / "m.mlb")
    engine.forward(IDS[:20], "none")
    engine.truncate(12)
    got = engine.forward(IDS[30:], "all")
    engine.reset()
    engine.forward(IDS[:12], "none")
    want = engine.forward(IDS[30:], "all")
    # Not to the bit: the order of torch's sums depends on how many positions went in together.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", ["hybrid", "everything", "window"])
def test_snapshots(name: str, tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb", HEADERS[name])
    engine = _engine(tmp_path / "m.mlb")
    engine.forward(IDS[:10], "none")
    snapshot = engine.snapshot()
    first = engine.forward(IDS[10:], "all")
    for _ in range(2):
        engine.restore(snapshot)
        assert engine.position == 10
        np.testing.assert_array_equal(engine.forward(IDS[10:], "all"), first)


def test_the_observer_sees_every_input(tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb", HEADERS["hybrid"])
    engine = _engine(tmp_path / "m.mlb")
    seen = []
    engine.observer = lambda layer, slot, values: seen.append((layer, slot, values.shape, values.dtype.name))
    engine.forward(IDS, "last")
    per_layer = [("attn_in", 64), ("attn_out", 0), ("ffn_in", 64), ("ffn_act", 96)]
    widths = {0: 64, 1: 64, 2: 128}  # V x dv of linear layers, q_dim of the attention layer
    want = [(i, slot, (N_IDS, n or widths[i]), "float32") for i in range(3) for slot, n in per_layer]
    assert seen == [*want, (None, "classifier", (1, 64), "float32")]
    seen.clear()
    engine.forward(IDS[:1], "none")
    assert len(seen) == 12


def test_impossible_options(tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb", tiny())
    with pytest.raises(UsageError, match="device 'meta' cannot be used"):
        _engine(tmp_path / "m.mlb", device="meta")
    source = DenseWeights(tiny(), lambda spec: np.zeros(spec.shape, np.float32))
    with pytest.raises(UsageError, match="is not quantized: a checkpoint runs with --activations f32 only"):
        ReferenceEngine(source, EngineOptions(8, activations="q8"), SILENT)


@pytest.mark.parametrize(("dtype", "bound"), [("f32", 0.0), ("f16", 2e-3), ("bf16", 2e-2)])
def test_weights_in_half_the_bytes(dtype: str, bound: float, tmp_path: Path) -> None:
    """What other devices use by default: only the products lose digits."""
    random_model(tmp_path / "m.mlb", HEADERS["everything"])
    want = _engine(tmp_path / "m.mlb").forward(IDS, "all")
    got = _engine(tmp_path / "m.mlb", dtype=dtype).forward(IDS, "all")
    error = np.abs(got - want).max() / np.abs(want).max()
    assert bound / 100 <= error <= bound


def test_a_type_of_weights_needs_weights_that_are_dequantized(tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb", tiny())
    with pytest.raises(UsageError, match="--dtype is for --activations f32"):
        _engine(tmp_path / "m.mlb", dtype="bf16", activations="q8")
    with pytest.raises(UsageError, match="--dtype is for --engine reference"):
        engines.open_engine(open_mlb(tmp_path / "m.mlb"), EngineOptions(8, dtype="bf16"), "fast")


def test_weights_that_were_never_quantized(tmp_path: Path) -> None:
    stored = random_model(tmp_path / "m.mlb", HEADERS["everything"])
    source = DenseWeights(open_mlb(tmp_path / "m.mlb").header, lambda spec: stored[spec.name])
    dense = ReferenceEngine(source, EngineOptions(64), SILENT)
    np.testing.assert_array_equal(dense.forward(IDS, "all"), _engine(tmp_path / "m.mlb").forward(IDS, "all"))
