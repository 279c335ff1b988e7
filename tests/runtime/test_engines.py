"""Choosing an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from krafla_cli.errors import UsageError
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.runtime.engine import EngineOptions
from krafla_cli.runtime.engines import default_engine, open_engine
from tests.helpers.models import random_model


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (EngineOptions(8), "fast"),
        (EngineOptions(8, activations="q8"), "fast"),
        (EngineOptions(8, activations="f32"), "reference"),
        (EngineOptions(8, device="cuda"), "reference"),
    ],
)
def test_default(options: EngineOptions, name: str) -> None:
    assert default_engine(options) == name


def test_by_name(tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb")
    model = open_mlb(tmp_path / "m.mlb")
    engine = open_engine(model, EngineOptions(8, activations="q8", kv="f16"), "reference")
    assert (engine.name, engine.activations, engine.kv, engine.n_ctx) == ("reference", "q8", "f16", 8)
    with pytest.raises(UsageError, match="no engine 'slow'; there are fast, reference"):
        open_engine(model, EngineOptions(8), "slow")
    with pytest.raises(UsageError, match="the fast engine runs on the CPU only, not on cuda"):
        open_engine(model, EngineOptions(8, device="cuda"), "fast")
