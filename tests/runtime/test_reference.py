"""The reference engine against transformers on the same dequantized weights, family by family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.progress import SILENT
from krafla_cli.runtime.engine import EngineOptions
from krafla_cli.runtime.reference import open_engine
from tests.helpers.twins import FAMILIES, transformers_model, write_twin

N_IDS = 40  # longer than every window


def _engine(path: Path, n_ctx: int = 256, **options: str):
    return open_engine(open_mlb(path), EngineOptions(n_ctx, **options), SILENT)


def _close(got, want) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers(name: str, seed: int, tmp_path: Path) -> None:
    model = transformers_model(FAMILIES[name], seed)
    write_twin(tmp_path / "m.mlb", FAMILIES[name], model, wtype=1 + seed % 2, scale_f16=int(seed < 2))
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
