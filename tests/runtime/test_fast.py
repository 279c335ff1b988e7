"""The fast engine: against the reference with codes replayed; the same bits however a sequence is run; its edges."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.errors import DataError, UsageError
from krafla_cli.formats.mlb import Header
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.progress import SILENT
from krafla_cli.quant.blocks import Quantized
from krafla_cli.quant.q8_0 import quantize_activations
from krafla_cli.runtime.engine import EngineOptions
from krafla_cli.runtime.fast import BATCH, FastEngine
from krafla_cli.runtime.reference import ReferenceEngine
from krafla_cli.runtime.weights import FileWeights
from tests.helpers.models import HEADERS, random_arrays, random_model, tiny, write_model

N_IDS = 40  # longer than every window
IDS = np.random.default_rng(11).integers(0, 101, N_IDS)
PATH = "m.mlb"


def _fast(folder: Path, header: Header | None = None, n_ctx: int = 256, **options: object) -> FastEngine:
    """The engine on the model in ``folder``, made from ``header`` if given."""
    if header is not None:
        random_model(folder / PATH, header)
    return FastEngine(open_mlb(folder / PATH), EngineOptions(n_ctx, **options))


def _reference(folder: Path, **options: str) -> ReferenceEngine:
    return ReferenceEngine(FileWeights(open_mlb(folder / PATH)), EngineOptions(256, **options), SILENT)


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("name", HEADERS)
def test_equals_reference_on_the_same_codes(name: str, kv: str, tmp_path: Path) -> None:
    """Every recorded input, and the logits: 1e-5 and 1e-4 of the largest (f16 caches may round to the neighbour)."""
    fast = _fast(tmp_path, HEADERS[name], kv=kv)
    recorded = []
    fast.observer = lambda layer, slot, x: recorded.append((layer, slot, x.copy()))
    got = fast.forward(IDS, "all")
    reference, inputs, worst = _reference(tmp_path, activations="q8", kv=kv), iter(recorded), 0.0

    def replay(layer: int | None, slot: str, x: np.ndarray) -> Quantized:
        nonlocal worst
        at, place, values = next(inputs)
        assert (at, place, values.shape) == (layer, slot, x.shape)
        worst = max(worst, float(np.abs(values - x).max() / np.abs(x).max()))
        return quantize_activations(values)

    reference.quantize_inputs = replay
    want = reference.forward(IDS, "all")
    assert next(inputs, None) is None
    assert worst <= (1e-5 if kv == "f32" else 1e-3)
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


N_LONG = 2 * BATCH + 20
LONG_IDS = np.random.default_rng(12).integers(0, 101, N_LONG)


@pytest.mark.parametrize("name", HEADERS)
def test_the_same_bits_for_any_threads_and_batches(name: str, tmp_path: Path) -> None:
    header = tiny(**{**HEADERS[name].values, "max_seq": 1024, "flags": HEADERS[name].flags})
    want = _fast(tmp_path, header, N_LONG, threads=1).forward(LONG_IDS, "all")
    for threads, size in ((2, N_LONG), (3, 512), (1, 64), (2, 7), (1, 1)):
        engine = _fast(tmp_path, None, N_LONG, threads=threads)
        parts = [engine.forward(LONG_IDS[i : i + size], "all") for i in range(0, N_LONG, size)]
        np.testing.assert_array_equal(np.concatenate(parts), want)


def test_logits_where_they_are_asked_for(tmp_path: Path) -> None:
    engine = _fast(tmp_path, tiny(max_seq=1024), N_LONG)
    everything = engine.forward(LONG_IDS, "all")
    for n in (1, 5, BATCH, BATCH + 1, N_LONG):
        engine.reset()
        assert engine.forward(LONG_IDS[:n], "none").shape == (0, 101)
        engine.reset()
        np.testing.assert_array_equal(engine.forward(LONG_IDS[:n], "last"), everything[n - 1 : n])


def _mean_divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Mean KL divergence of the distributions of logits b from those of a, nats."""
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (a.astype(float), b.astype(float)))
    return float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())


def test_free_running_divergence_from_reference(tmp_path: Path) -> None:
    """Codes that flip by chance make runs drift apart; over 20 seeds that stays far below what quantization costs."""
    between, quantization = [], []
    for seed in range(20):
        random_model(tmp_path / PATH, HEADERS["bias-qk_norm"], seed)
        exact = _reference(tmp_path).forward(IDS, "all")
        coarse = _reference(tmp_path, activations="q8").forward(IDS, "all")
        between.append(_mean_divergence(coarse, _fast(tmp_path, kv="f32").forward(IDS, "all")))
        quantization.append(_mean_divergence(exact, coarse))
    assert np.mean(between) < 0.05 * np.mean(quantization)
    assert np.max(between) < 0.5 * np.mean(quantization)


@pytest.mark.parametrize("name", ["hybrid", "everything", "window"])
def test_snapshots_and_going_back(name: str, tmp_path: Path) -> None:
    engine = _fast(tmp_path, HEADERS[name])
    engine.forward(IDS[:10], "none")
    snapshot = engine.snapshot()
    first = engine.forward(IDS[10:], "all")
    for _ in range(2):
        engine.restore(snapshot)
        np.testing.assert_array_equal(engine.forward(IDS[10:], "all"), first)
    engine.reset()
    engine.forward(IDS[:10], "none")
    np.testing.assert_array_equal(engine.forward(IDS[10:], "all"), first)


def test_truncating_is_like_never_having_run(tmp_path: Path) -> None:
    engine = _fast(tmp_path, HEADERS["gemma3"])
    engine.forward(IDS[:20], "none")
    engine.truncate(12)
    got = engine.forward(IDS[30:], "all")
    engine.reset()
    engine.forward(IDS[:12], "none")
    np.testing.assert_array_equal(engine.forward(IDS[30:], "all"), got)


def test_the_observer_sees_every_input(tmp_path: Path) -> None:
    engine = _fast(tmp_path, HEADERS["hybrid"])
    seen: list[tuple] = []
    engine.observer = lambda layer, slot, values: seen.append((layer, slot, values.shape, values.dtype.name))
    engine.forward(IDS, "last")
    per_layer = [("attn_in", 64), ("attn_out", 0), ("ffn_in", 64), ("ffn_act", 96)]
    widths = {0: 64, 1: 64, 2: 128}  # V x dv of linear layers, q_dim of the attention layer
    want = [(i, slot, (N_IDS, n or widths[i]), "float32") for i in range(3) for slot, n in per_layer]
    assert seen == [*want, (None, "classifier", (1, 64), "float32")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.1.ffn_norm", "layer 1, ffn_in: channel 5 of an activation is NaN"),
        ("final_norm", "the classifier's input: channel 5 of an activation is NaN"),
    ],
)
@pytest.mark.parametrize("n", [1, 9])
def test_a_broken_activation_names_the_place(name: str, message: str, n: int, tmp_path: Path) -> None:
    arrays = random_arrays(HEADERS["plain"])
    arrays[name][5] = np.nan
    write_model(tmp_path / PATH, HEADERS["plain"], arrays)
    engine = _fast(tmp_path)
    with pytest.raises(DataError, match=message):
        engine.forward(IDS[:n])
    assert engine.position == 0


def test_impossible_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--engine reference"):
        _fast(tmp_path, tiny(), activations="f32")


def test_a_warm_start_imports_neither_numba_nor_torch(tmp_path: Path) -> None:
    _fast(tmp_path, tiny()).forward(IDS)  # compiles what is missing
    code = (
        "import sys; from krafla_cli.formats.mlb_file import open_mlb; "
        "from krafla_cli.runtime.engine import EngineOptions; from krafla_cli.runtime.engines import open_engine; "
        "open_engine(open_mlb(sys.argv[1]), EngineOptions(64)).forward([1, 2, 3]); "
        "print({'numba', 'torch'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / PATH)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"
