"""The names that ``import krafla_cli`` offers."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import krafla_cli
from krafla_cli.errors import FileError
from krafla_cli.runtime.generation import Generation
from krafla_cli.runtime.sampling import Sampler, SamplingOptions
from krafla_cli.tokenizer.stream import decode
from tests.helpers.models import TINY, random_model
from tests.helpers.runnable import write_runnable

DATA = Path(__file__).parent / "data"


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


def test_generate(tmp_path: Path) -> None:
    model = krafla_cli.open_model(write_runnable(tmp_path, stop_ids=()), engine="reference", kv="f16")
    pieces = list(model.generate("the cat", 6))
    report = Generation()
    ids = list(model.run(model.encode("the cat"), Sampler(SamplingOptions()), report, 6))
    assert "".join(pieces) == decode(model.tokenizer, ids, skip_special_tokens=True)
    assert (report.prompt_tokens, report.ids, report.stop_reason) == (len(model.encode("the cat")), ids, "length")
    sampled = ["".join(model.generate("the cat", 6, sampling=SamplingOptions(1.0), seed=s)) for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = krafla_cli.nothing


@pytest.fixture(scope="module")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples use: the demo checkpoint, its conversion, the demo embedder."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "demo").symlink_to(DATA / "demo", target_is_directory=True)
    for command in (["convert", "demo", "-o", "demo.mlb"], ["pack-embed", str(DATA / "student"), "-o", "student.bin"]):
        subprocess.run([sys.executable, "-m", "krafla_cli", *command, "--quiet"], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("name", krafla_cli.__all__)
def test_docstrings_show_what_happens(
    name: str, demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(krafla_cli, name)
    monkeypatch.chdir(demo_files)
    if name == "convert":
        from krafla_cli.convert.pipeline import convert as function

        (tmp_path / "demo").symlink_to(DATA / "demo", target_is_directory=True)
        monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(recurse=False)
    (found,) = finder.find(function, name, inspect.getmodule(function), globs={"krafla_cli": krafla_cli})
    assert found.examples
    shown: list[str] = []
    doctest.DocTestRunner().run(found, out=shown.append)
    assert not shown, "".join(shown)
