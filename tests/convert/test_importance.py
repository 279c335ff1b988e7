"""Which slot of an importance matrix each tensor uses, and what happens where there is nothing to use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.convert.importance import Importance
from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.errors import ShapeError, UsageError
from krafla_cli.formats import mli
from krafla_cli.formats.mlb import Header, tensors
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.formats.mli import Dimensions, Imatrix
from krafla_cli.quant.matrix import dequantize, quantize
from tests.convert.test_pipeline import Remarks
from tests.formats.test_mlb import FULL, MINIMAL
from tests.helpers.llama import CONFIG, write
from tests.helpers.llama import tensors as llama_tensors

DIMENSIONS = Dimensions(2, 64, 96, 64)


def filled(dimensions: Dimensions, seed: int = 0) -> Imatrix:
    """Random sums; the mean square differs from slot to slot."""
    sums = np.random.default_rng(seed).random(dimensions.n_sums) + 0.5
    return Imatrix(dimensions, sums, layer_tokens=7, classifier_tokens=5)


def ratio(sums: np.ndarray) -> np.ndarray:
    return np.maximum(sums / sums.mean(), 0.001)


def slots_used(header: Header, imatrix: Imatrix, remarks: Remarks) -> dict[str, str | None]:
    """Which slot each tensor's importance equals, by the tensor's name."""
    importance = Importance(imatrix, header, "i.mli", remarks)
    known = {mli.slot_name(*slot): ratio(imatrix.of(*slot)) for slot in mli.slots(imatrix.dimensions)}
    used = {}
    for spec in tensors(header):
        values = importance.of(spec)
        if values is not None:
            used[spec.name] = next(n for n, v in known.items() if v.shape == values.shape and np.allclose(v, values))
    return used


def test_slots_of_attention_layers() -> None:
    header = replace(
        FULL, flags=bytes([0, 0]), q8_mask=0, lin_k_heads=0, lin_v_heads=0, lin_k_dim=0, lin_v_dim=0, lin_conv=0
    )
    remarks = Remarks()
    used = slots_used(header, filled(DIMENSIONS), remarks)
    assert used == {"tok_emb": "classifier"} | {
        f"layers.{i}.{role}": f"layers.{i}.{slot}"
        for i in range(2)
        for role, slot in {
            **dict.fromkeys(("wq", "wk", "wv", "wg"), "attn_in"),
            "wo": "attn_out",
            "w1": "ffn_in",
            "w3": "ffn_in",
            "w2": "ffn_act",
        }.items()
    }
    assert remarks.texts == []


def test_slots_of_linear_layers() -> None:
    header = replace(FULL, flags=bytes([8, 8]), q8_mask=0)
    used = slots_used(header, filled(DIMENSIONS), Remarks())
    assert {k: v for k, v in used.items() if k.startswith("layers.0.l")} == {
        "layers.0.lqkv": "layers.0.attn_in",
        "layers.0.lz": "layers.0.attn_in",
        "layers.0.lout": "layers.0.attn_out",
    }


def test_lout_of_another_width_gets_the_plain_fit() -> None:
    header, remarks = replace(FULL, flags=bytes([8, 8]), q8_mask=0, lin_v_dim=8), Remarks()
    used = slots_used(header, filled(DIMENSIONS), remarks)
    assert "layers.0.lout" not in used
    assert remarks.texts == [
        "warning: i.mli: lout: its input has 32 channels, q_dim is 64: MLI1 has no place for it; "
        "quantized without importance"
    ]


def test_untied_embedding_and_q8_classes_use_none() -> None:
    header = replace(FULL, shared_classifier=0, q8_mask=4 + 64)
    used = slots_used(header, filled(DIMENSIONS), Remarks())
    assert "tok_emb" not in used
    assert used["wcls"] == "classifier"
    assert not [n for n in used if n.endswith(("wq", "wk", "wg", "lqkv", "w2"))]


@pytest.mark.parametrize("sums", [0.0, np.inf])
def test_unusable_slots_weigh_all_channels_alike(sums: float) -> None:
    imatrix, remarks = filled(DIMENSIONS), Remarks()
    imatrix.of(1, "ffn_act")[:] = sums
    header = replace(FULL, flags=bytes(2), q8_mask=0)
    importance = Importance(imatrix, header, "i.mli", remarks)
    spec = next(t for t in tensors(header) if t.name == "layers.1.w2")
    assert (importance.of(spec) == 1).all()
    assert remarks.texts == [
        "warning: i.mli: layers.1.ffn_act: the mean of its sums is zero or not finite; quantized without importance"
    ]


def test_no_tokens() -> None:
    imatrix, remarks = filled(DIMENSIONS), Remarks()
    imatrix.classifier_tokens = 0
    importance = Importance(imatrix, replace(FULL, q8_mask=0), "i.mli", remarks)
    assert (importance.of(tensors(FULL)[1]) == 1).all()
    assert "classifier: no tokens were summed into it" in remarks.texts[0]


def test_other_dimensions_are_refused() -> None:
    with pytest.raises(ShapeError) as raised:
        Importance(filled(DIMENSIONS), MINIMAL, "i.mli", Remarks())
    assert str(raised.value) == (
        "i.mli: made for 2 layers, dim 64, hidden_dim 96, q_dim 64; "
        "the model has 1 layers, dim 32, hidden_dim 32, q_dim 32"
    )


def test_a_whole_block_without_importance_is_still_quantized() -> None:
    imatrix = filled(DIMENSIONS)
    imatrix.of(0, "attn_in")[:32] = 0.0
    importance = Importance(imatrix, replace(FULL, flags=bytes(2), q8_mask=0), "i.mli", Remarks())
    values = importance.of(next(t for t in tensors(FULL) if t.role == "wv"))
    assert (values[:32] == np.float32(0.001)).all()
    w = np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)
    result = quantize(w, "q4_0", importance=values)
    assert np.abs(dequantize(result.q, result.d, "q4_0", 32, 64) - w).max() < 0.4


def test_conversion_with_an_imatrix(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    mli.write(filled(DIMENSIONS, 3), tmp_path / "i.mli")
    convert(folder, tmp_path / "plain.mlb")
    result = convert(folder, tmp_path / "imp.mlb", options=Options(imatrix=str(tmp_path / "i.mli")))
    assert result.q4_rule == "fit"
    name, role = "model.layers.1.mlp.down_proj.weight", "layers.1.w2"
    w, importance = llama_tensors()[name], ratio(mli.read(tmp_path / "i.mli").of(1, "ffn_act"))

    def error(path: Path) -> float:
        m = open_mlb(path).quantized(role)
        return float((importance * (dequantize(m.q, m.d, "q4_0", *m.shape) - w) ** 2).sum())

    assert error(tmp_path / "imp.mlb") < error(tmp_path / "plain.mlb")
    want = quantize(w, "q4_0", importance=importance.astype(np.float32))
    assert np.array_equal(open_mlb(tmp_path / "imp.mlb").quantized(role).q, want.q)


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "m")
    mli.write(filled(DIMENSIONS), tmp_path / "i.mli")
    with pytest.raises(UsageError, match="--imatrix selects the rule fit"):
        convert(folder, tmp_path / "x.mlb", options=Options(q4_rule="round", imatrix=str(tmp_path / "i.mli")))
    base = ["convert", str(folder), "-o", str(tmp_path / "x.mlb")]
    assert run([*base, "--imatrix", str(tmp_path / "i.mli"), "--q4-rule", "round"]) == 2
    assert run([*base[:2], "-o", str(tmp_path / "i.mli"), "--imatrix", str(tmp_path / "i.mli"), "--force"]) == 1
    assert "it is the input itself" in capsys.readouterr().err
    assert run([*base, "--q8-classes", "v,nope"]) == 2
    assert (
        '--q8-classes: no class "nope"; there are tok_emb, wcls, qk, v, o, gate_up, down, none, all'
        in capsys.readouterr().err
    )
    assert run([*base, "--wtype", "q8", "--q8-classes", "v"]) == 2
    assert not (tmp_path / "x.mlb").exists()


@pytest.mark.parametrize(("classes", "mask"), [("none", 0), ("all", 127), ("v,o,down", 88), ("tok_emb", 1)])
def test_q8_classes(tmp_path: Path, classes: str, mask: int) -> None:
    folder = write(tmp_path / "m", CONFIG)
    assert run(["convert", str(folder), "-o", str(tmp_path / "x.mlb"), "--q8-classes", classes, "--quiet"]) == 0
    assert open_mlb(tmp_path / "x.mlb").header.q8_mask == mask
