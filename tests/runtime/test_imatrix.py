"""The imatrix recorder: sums against a plain computation, counts, windows, and broken activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from krafla_cli.errors import DataError, FormatError, InputError, ShapeError
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.formats.mli import Dimensions, Imatrix, read, slots, write
from krafla_cli.progress import SILENT
from krafla_cli.runtime.engine import Engine, EngineOptions
from krafla_cli.runtime.imatrix import Recorder, read_previous, record, windows
from krafla_cli.runtime.reference import open_engine
from tests.helpers.models import HEADERS, random_arrays, random_model, write_model
from tests.helpers.twins import FAMILIES, transformers_model, write_twin

IDS = np.random.default_rng(1).integers(0, 101, 50).tolist()


def _engine(path: Path) -> Engine:
    return open_engine(open_mlb(path), EngineOptions(256), SILENT)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    random_model(tmp_path / "m.mlb", HEADERS["hybrid"])
    return _engine(tmp_path / "m.mlb")


def test_windows() -> None:
    assert list(windows([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]
    assert list(windows([1, 2, 3, 4, 5], 3, [9])) == [[9, 1, 2], [9, 3, 4], [9, 5]]
    with pytest.raises(InputError, match="the text is empty"):
        list(windows([], 3, [9]))
    with pytest.raises(InputError, match="a window of 1 positions holds no text beside the 1 start tokens"):
        list(windows([1], 1, [9]))


def test_sums_of_squares_of_every_input(engine: Engine) -> None:
    seen: dict[tuple[int | None, str], list[np.ndarray]] = {}
    engine.observer = lambda layer, slot, values: seen.setdefault((layer, slot), []).append(values.copy())
    for start in range(0, 50, 20):
        engine.reset()
        engine.forward(IDS[start : start + 20], "all")
    imatrix = record(engine, IDS, 20)
    assert (imatrix.layer_tokens, imatrix.classifier_tokens) == (50, 50)
    for layer, slot in slots(imatrix.dimensions):
        values = np.concatenate(seen[layer, slot]).astype(np.float64)
        if values.shape[1] == len(imatrix.of(layer, slot)):
            np.testing.assert_allclose(imatrix.of(layer, slot), (values**2).sum(0), rtol=1e-6)
        else:  # lout of a linear layer whose V x dv is not q_dim has no place
            assert (layer, slot) in {(0, "attn_out"), (1, "attn_out")}
            assert not imatrix.of(layer, slot).any()
    assert engine.observer is None


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_sums_are_those_of_transformers_modules(name: str, tmp_path: Path) -> None:
    model = transformers_model(FAMILIES[name], 2)
    write_twin(tmp_path / "m.mlb", FAMILIES[name], model, wtype=1)
    sums: dict[str, np.ndarray] = {}

    def hook(module_name: str) -> Callable[..., None]:
        def add(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            squares = inputs[0][0].double().square().sum(0).numpy()
            sums[module_name] = sums.get(module_name, 0) + squares

        return add

    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(module_name))
    for start in (0, 32):
        with torch.no_grad():
            model(torch.tensor([IDS[start : start + 32]]))
    imatrix = record(_engine(tmp_path / "m.mlb"), IDS, 32)
    modules = {
        "attn_in": "self_attn.k_proj",
        "attn_out": "self_attn.o_proj",
        "ffn_in": "mlp.up_proj",
        "ffn_act": "mlp.down_proj",
    }
    for layer, slot in slots(imatrix.dimensions):
        module_name = "lm_head" if layer is None else f"model.layers.{layer}.{modules[slot]}"
        module_name = module_name.replace("self_attn.k", "linear_attn.in") if module_name not in sums else module_name
        want = sums.get(module_name.replace("in_proj", "in_proj_z"))
        if want is None:  # lout of a linear layer has no place here
            assert not imatrix.of(layer, slot).any()
        else:
            np.testing.assert_allclose(imatrix.of(layer, slot), want, rtol=1e-3, err_msg=f"{layer} {slot}")


def test_without_logits_the_classifier_counts_nothing(engine: Engine) -> None:
    imatrix = record(engine, IDS, 20, with_logits=False)
    assert (imatrix.layer_tokens, imatrix.classifier_tokens) == (50, 0)
    assert not imatrix.of(None, "classifier").any()
    assert imatrix.of(2, "ffn_act").all()


def test_a_calibration_of_one_token(engine: Engine) -> None:
    assert record(engine, [7]).layer_tokens == 1


def test_start_tokens_are_run_and_counted_in_every_window(engine: Engine) -> None:
    assert record(engine, IDS, 21, prefix=[1]).layer_tokens == 50 + 3


def test_adding_to_a_file_is_one_run_over_both_texts(engine: Engine) -> None:
    together = record(engine, IDS[:40], 20)
    first = record(engine, IDS[:20], 20)
    second = record(engine, IDS[20:40], 20, onto=first)
    assert second.to_bytes() == together.to_bytes()


def test_the_sum_of_a_window_does_not_depend_on_batches() -> None:
    dimensions = Dimensions(1, 5, 1, 5)
    values = np.random.default_rng(0).standard_normal((300, 5)).astype(np.float32)
    totals = []
    for split in ([], [1], [7, 130, 299]):
        recorder = Recorder(Imatrix.empty(dimensions))
        for part in np.split(values, split):
            recorder(0, "ffn_in", part)
        recorder.end_window(300, 0)
        totals.append(recorder.total.to_bytes())
    assert totals[0] == totals[1] == totals[2]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ("layers.1.attn_norm", "layer 1: the input of wq, wk and wv is nan at channel 3"),
        ("layers.0.ffn_norm", "layer 0: the input of w1 and w3 is nan at channel 3"),
        ("final_norm", "the input of the classifier is nan at channel 3"),
    ],
)
def test_a_broken_activation_stops_and_names_the_place(tmp_path: Path, tensor: str, text: str) -> None:
    header = HEADERS["hybrid"]
    arrays = random_arrays(header)
    arrays[tensor][3] = np.nan
    write_model(tmp_path / "m.mlb", header, arrays)
    engine = _engine(tmp_path / "m.mlb")
    with pytest.raises(DataError, match=text):
        record(engine, IDS, 20)
    assert engine.observer is None


def test_previous_files(tmp_path: Path) -> None:
    header = HEADERS["plain"]
    path = tmp_path / "i.mli"
    assert read_previous(path, header) is None
    write(Imatrix.empty(Dimensions.of(header)), path)
    assert read_previous(path, header) is not None
    write(Imatrix.empty(Dimensions(1, 64, 96, 128)), path, force=True)
    with pytest.raises(ShapeError, match=r"is of another model: 1 layers, .*; this one has 3 layers"):
        read_previous(path, header)
    path.write_bytes(b"MLI1")
    with pytest.raises(FormatError, match="needs 40 bytes"):
        read_previous(path, header)


def test_round_trip(tmp_path: Path, engine: Engine) -> None:
    imatrix = record(engine, IDS)
    write(imatrix, tmp_path / "i.mli")
    assert read(tmp_path / "i.mli").to_bytes() == imatrix.to_bytes()
