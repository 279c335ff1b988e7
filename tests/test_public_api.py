"""The names that ``import krafla_cli`` offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import krafla_cli
from krafla_cli.errors import FileError
from tests.helpers.models import TINY, random_model


def test_importing_costs_nothing() -> None:
    code = "import sys, krafla_cli; print(sorted({'numpy', 'torch', 'numba', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_convert_can_be_called_whatever_was_imported_first() -> None:
    import krafla_cli.convert.pipeline

    with pytest.raises(FileError, match="does not exist"):
        krafla_cli.convert("no-such-folder")


def test_validate(tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb")
    assert krafla_cli.validate(tmp_path / "m.mlb").valid


def test_open_model(tmp_path: Path) -> None:
    random_model(tmp_path / "m.mlb")
    model = krafla_cli.open_model(tmp_path / "m.mlb", engine="reference")
    assert (model.config.dim, model.config.vocab) == (TINY.dim, TINY.vocab)
    logits = model.logits([1, 5, 7])
    assert (logits.shape, logits.dtype) == ((3, 101), np.float32)
    np.testing.assert_allclose(model.logits([1, 5]), logits[:2], rtol=1e-4, atol=1e-4)  # each call starts anew
    with pytest.raises(FileError, match=r"no tokenizer: tried .*m\.mlt, .*m\.tokenizer\.json; give one"):
        next(model.generate("hi"))


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = krafla_cli.nothing
