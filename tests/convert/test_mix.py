"""``--q8-classes auto``: the best of all mixes within a size, by errors measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.convert.mix import bits_per_weight
from krafla_cli.convert.pipeline import Options, Result, convert
from krafla_cli.errors import InputError, UsageError
from krafla_cli.formats import mli
from krafla_cli.formats.mlb import MATRIX_CLASS, Q8_CLASSES
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.formats.sidecar import read_sidecar
from tests.helpers.llama import CONFIG, tensors, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in which one class, the values, is hard to quantize: a spike in each block."""
    weights = tensors()
    for name, values in weights.items():
        if "v_proj" in name:
            values[:, ::32] *= 40
    return write(tmp_path / "hf", CONFIG, weights)


def errors_by_class(result: Result) -> dict[str, float]:
    sums: dict[str, float] = {}
    for tensor in result.plan.tensors:
        if tensor.spec.is_quantized:
            name = MATRIX_CLASS[tensor.spec.role]
            sums[name] = sums.get(name, 0.0) + result.errors[tensor.spec.name].relative ** 2
    return sums


def test_the_numbers_are_those_of_whole_conversions(folder: Path, tmp_path: Path) -> None:
    auto = convert(folder, tmp_path / "auto.mlb", options=Options("q4", target_bpw=5.0))
    assert auto.mix is not None
    q4 = convert(folder, tmp_path / "q4.mlb", options=Options("q4"), measure=True)
    q8 = convert(folder, tmp_path / "q8.mlb", options=Options("q8"), measure=True)
    for choice in auto.mix.classes:
        assert choice.error_q4 == pytest.approx(errors_by_class(q4)[choice.name])
        assert choice.error_q8 == pytest.approx(errors_by_class(q8)[choice.name])
        options = Options("q4", q8_mask=Q8_CLASSES[choice.name])
        alone = convert(folder, tmp_path / "one.mlb", options=options, force=True)
        assert abs(choice.extra_bytes - (alone.n_bytes - q4.n_bytes)) < 64 * len(alone.plan.tensors)


@pytest.mark.parametrize("target", [5.0, 5.6, 7.0, 9.0])
def test_no_other_mix_within_the_target_is_better(target: float, folder: Path, tmp_path: Path) -> None:
    auto = convert(folder, tmp_path / "auto.mlb", options=Options(target_bpw=target))
    mix = auto.mix
    assert mix is not None
    assert auto.bits_per_weight == mix.bits_per_weight <= target
    assert mix.q8_mask == sum(Q8_CLASSES[c.name] for c in mix.classes if c.chosen)
    assert open_mlb(auto.output).header.q8_mask == mix.q8_mask
    for n in range(len(mix.classes) + 1):
        for subset in itertools.combinations(mix.classes, n):
            mask = sum(Q8_CLASSES[c.name] for c in subset)
            size = convert(folder, tmp_path / "x.mlb", options=Options("q4", q8_mask=mask), dry_run=True)
            if size.bits_per_weight <= target:
                best = sum(c.benefit for c in mix.classes if c.chosen)
                assert sum(c.benefit for c in subset) <= best * (1 + 1e-12)


def test_what_is_hard_to_quantize_comes_first(folder: Path, tmp_path: Path) -> None:
    mix = convert(folder, tmp_path / "auto.mlb", options=Options(target_bpw=5.3)).mix
    assert mix is not None
    per_byte = {c.name: c.benefit_per_megabyte for c in mix.classes}
    assert max(per_byte, key=per_byte.__getitem__) == "v"
    assert [c.chosen for c in mix.classes if c.name == "v"] == [True]


def test_bits_per_weight_are_those_of_the_file(folder: Path, tmp_path: Path) -> None:
    for mask in (0, 9, 127):
        result = convert(folder, tmp_path / f"{mask}.mlb", options=Options("q4", q8_mask=mask))
        assert bits_per_weight(open_mlb(result.output).header) == result.bits_per_weight
        assert 8 * result.output.stat().st_size / result.n_weights == result.bits_per_weight


def test_an_importance_weighs_the_errors(folder: Path, tmp_path: Path) -> None:
    plain = convert(folder, tmp_path / "a.mlb", options=Options(target_bpw=5.0)).mix
    dimensions = mli.Dimensions.of(open_mlb(tmp_path / "a.mlb").header)
    sums = np.random.default_rng(0).random(dimensions.n_sums) + 0.01
    mli.write(mli.Imatrix(dimensions, sums, 1, 1), tmp_path / "i.mli", force=True)
    options = Options(target_bpw=5.0, imatrix=str(tmp_path / "i.mli"))
    weighted = convert(folder, tmp_path / "b.mlb", options=options).mix
    assert plain is not None
    assert weighted is not None
    changed = [a.name for a, b in zip(plain.classes, weighted.classes, strict=True) if a.error_q8 != b.error_q8]
    assert changed == [c.name for c in plain.classes if c.name != "tok_emb"]  # its input is an id


def test_targets_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    def auto(**options: Any) -> Result:
        return convert(folder, tmp_path / "m.mlb", options=Options(**options))

    with pytest.raises(InputError, match=r"--target-bpw 4: with all classes in q4 the model has \d\.\d+ bits"):
        auto(target_bpw=4.0)
    for wrong in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(UsageError, match="--target-bpw must be a number above 0"):
            auto(target_bpw=wrong)
    with pytest.raises(UsageError, match="goes without others and with q4"):
        auto(wtype="q8", target_bpw=5.0)
    with pytest.raises(UsageError, match="goes without others and with q4"):
        auto(q8_mask=8, target_bpw=5.0)
    assert list(tmp_path.glob("m.*")) == []


def test_the_command_shows_the_choice(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(folder), "-o", str(tmp_path / "m.mlb"), "--q8-classes", "auto"]
    assert run([*arguments, "--target-bpw", "5.3", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "benefit per MB" in shown
    assert "would write" in shown
    assert run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in document["mix"]] == [c for c in Q8_CLASSES if c in document["encodings"]]
    assert document["bits_per_weight"] <= 5.0
    chosen = {c["name"] for c in document["mix"] if c["chosen"]}
    assert {name for name, kind in document["encodings"].items() if kind == "q8_0"} == chosen
    options = read_sidecar(tmp_path / "m.json").provenance["options"]
    assert (options["target_bpw"], options["q8_mask"]) == (5.0, sum(Q8_CLASSES[name] for name in chosen))
    assert run(["convert", str(folder), "-o", str(tmp_path / "n.mlb"), "--target-bpw", "5"]) == 2
    assert "--target-bpw is for --q8-classes auto" in capsys.readouterr().err
