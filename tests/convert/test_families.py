"""Every family from a checkpoint as transformers saves it to logits that equal transformers' on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.runtime.engine import EngineOptions
from krafla_cli.runtime.engines import open_engine
from tests.helpers.checkpoints import CHECKPOINTS, VOCAB, edit_config, load_dequantized, random_model, save

N_IDS = 40  # longer than every window
FAST_SEEDS, SLOW_SEEDS = range(2), range(2, 22)


def check(name: str, seed: int, folder: Path) -> None:
    """Prefill, uneven batches, and steps after a prompt, q8 and q4 in turn, to 1e-4 of the largest logit."""
    model = random_model(CHECKPOINTS[name], seed)
    options = Options(wtype="q4" if seed % 2 else "q8", scales="f32" if seed % 4 == 3 else "f16")
    result = convert(save(model, folder / "hf"), folder / "m.mlb", options=options)
    load_dequantized(model, result)
    ids = np.random.default_rng(seed).integers(0, VOCAB, N_IDS)
    with torch.no_grad():
        want = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    engine = open_engine(open_mlb(result.output), EngineOptions(N_IDS, activations="f32", kv="f32"), "reference")
    close(engine.forward(ids, "all"), want)
    engine.reset()
    close(np.concatenate([engine.forward(part, "all") for part in np.split(ids, [1, 8, 25])]), want)
    engine.reset()
    engine.forward(ids[:20], "none")
    close(np.concatenate([engine.forward([i]) for i in ids[20:]]), want[20:])


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("seed", FAST_SEEDS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_equals_transformers(name: str, seed: int, tmp_path: Path) -> None:
    check(name, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_equals_transformers_over_twenty_seeds(name: str, seed: int, tmp_path: Path) -> None:
    check(name, seed, tmp_path)


@pytest.mark.parametrize("name", ["llama3", "qwen3-yarn", "gemma3", "llama-linear"])
def test_far_beyond_the_original_context(name: str, tmp_path: Path) -> None:
    model = random_model(CHECKPOINTS[name], 5)
    result = convert(save(model, tmp_path / "hf"), tmp_path / "m.mlb", options=Options(wtype="q8"))
    load_dequantized(model, result)
    ids = np.random.default_rng(5).integers(0, VOCAB, 256)  # 4 x the original 64
    with torch.no_grad():
        want = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    engine = open_engine(open_mlb(result.output), EngineOptions(256, activations="f32", kv="f32"), "reference")
    close(engine.forward(ids, "all"), want)


def test_a_mistral_with_layer_types_is_a_ministral(tmp_path: Path) -> None:
    """As transformers reads it: Ministral 8B calls itself "mistral"."""
    folder = save(random_model(CHECKPOINTS["ministral"], 0), tmp_path / "hf")
    convert(folder, tmp_path / "ministral.mlb")
    convert(edit_config(folder, model_type="mistral"), tmp_path / "mistral.mlb")
    assert (tmp_path / "mistral.mlb").read_bytes() == (tmp_path / "ministral.mlb").read_bytes()
    assert transformers.AutoConfig.from_pretrained(folder).model_type == "ministral"
