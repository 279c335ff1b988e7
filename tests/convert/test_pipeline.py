"""``mlb convert`` as a whole: bytes, padding, sidecars, dry runs, and output that is complete or absent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.errors import DataError, FileError, ShapeError, UsageError
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.formats.sidecar import file_sha256, read_sidecar
from krafla_cli.progress import Progress
from krafla_cli.quant.matrix import dequantize
from krafla_cli.report.validate import validate
from tests.helpers.llama import CONFIG, tensors, write

DEMO = Path(__file__).parents[1] / "data" / "demo"


class Remarks(Progress):
    """Collects what a person would be told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def info(self, text: str) -> None:
        self.texts.append(text)

    def warn(self, text: str) -> None:
        self.texts.append("warning: " + text)


def dequantized(path: Path, name: str) -> np.ndarray:
    model = open_mlb(path)
    matrix = model.quantized(name)
    return dequantize(matrix.q, matrix.d, matrix.encoding, *matrix.shape)


def row_numbers(rows: int, cols: int) -> np.ndarray:
    """Row r holds r + 1 everywhere."""
    return np.repeat(np.arange(1, rows + 1, dtype=np.float32)[:, None], cols, axis=1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 2), (4, 4)])
def test_rows_are_reordered_by_hand(tmp_path: Path, heads: int, kv_heads: int) -> None:
    config = CONFIG | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    weights = tensors(config)
    for name in ("q", "k", "v"):
        key = f"model.layers.0.self_attn.{name}_proj.weight"
        weights[key] = row_numbers(*weights[key].shape)
    convert(write(tmp_path / "m", config, weights), tmp_path / "m.mlb", options=Options("q8", "f32"))
    head_dim = 64 // heads
    half = head_dim // 2
    one_head = [r for pair in zip(range(half), range(half, head_dim), strict=True) for r in pair]
    for role, n in (("wq", heads), ("wk", kv_heads)):
        rows = np.round(dequantized(tmp_path / "m.mlb", f"layers.0.{role}")[:, 0]).astype(int)
        assert list(rows) == [1 + h * head_dim + r for h in range(n) for r in one_head]
    values = np.round(dequantized(tmp_path / "m.mlb", "layers.0.wv")[:, 0]).astype(int)
    assert list(values) == list(range(1, kv_heads * head_dim + 1))


def test_ffn_width_is_padded_with_zeros(tmp_path: Path) -> None:
    config = CONFIG | {"intermediate_size": 172}
    weights, remarks = tensors(config), Remarks()
    convert(write(tmp_path / "m", config, weights), tmp_path / "m.mlb", options=Options("q8"), progress=remarks)
    assert "hidden_dim 172 is zero-padded to 192, a multiple of 32 (exact)" in remarks.texts
    w1, w2 = (dequantized(tmp_path / "m.mlb", f"layers.0.{role}") for role in ("w1", "w2"))
    assert (w1.shape, w2.shape) == ((192, 64), (64, 192))
    assert not w1[172:].any()
    assert not w2[:, 172:].any()
    assert np.abs(w2[:, :172] - weights["model.layers.0.mlp.down_proj.weight"]).max() < 0.02


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 48), ("head_dim", 6)])
def test_widths_that_do_not_fit_are_refused(tmp_path: Path, key: str, value: int) -> None:
    config = CONFIG | {key: value}
    with pytest.raises(ShapeError, match=r"config.json: cannot be stored: (dim|n_heads): .*multiple of 32, is"):
        convert(
            write(tmp_path / "m", config, tensors(CONFIG | {"hidden_size": config["hidden_size"]})), tmp_path / "m.mlb"
        )


def companions(folder: Path, **documents: Any) -> Path:
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def test_sidecar(tmp_path: Path) -> None:
    folder = companions(
        write(tmp_path / "m", CONFIG | {"eos_token_id": [2, 7]}),
        generation_config={"eos_token_id": [7, 9, 4000], "do_sample": True, "temperature": 0.6, "top_k": 20},
        tokenizer_config={"chat_template": "{{ messages }}", "bos_token": {"content": "<s>"}, "eos_token": "</s>"},
    )
    result = convert(folder, tmp_path / "out.mlb")
    sidecar = read_sidecar(tmp_path / "out.json")
    assert sidecar.stop_ids == (2, 7, 9)  # ids beyond the vocabulary stop nothing
    assert sidecar.sampling == {"temperature": 0.6, "top_k": 20.0}
    assert sidecar.chat_template == "{{ messages }}"
    assert sidecar.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert sidecar.sha256 == result.sha256 == file_sha256(tmp_path / "out.mlb")
    assert sidecar.provenance["source"] == "m"
    assert sidecar.provenance["options"]["q4_rule"] == "fit"
    assert sidecar.provenance["config"]["eos_token_id"] == [2, 7]
    assert sidecar.provenance["encodings"]["qk"] == "q4_0"


def test_chat_template_file_goes_first(tmp_path: Path) -> None:
    folder = companions(write(tmp_path / "m"), tokenizer_config={"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("new")
    convert(folder, tmp_path / "out.mlb")
    assert read_sidecar(tmp_path / "out.json").chat_template == "new"


def test_several_templates(tmp_path: Path) -> None:
    templates = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    folder = companions(write(tmp_path / "m"), tokenizer_config={"chat_template": templates})
    convert(folder, tmp_path / "out.mlb")
    assert read_sidecar(tmp_path / "out.json").chat_template == "d"


def test_greedy_models(tmp_path: Path) -> None:
    folder = companions(write(tmp_path / "m"), generation_config={"do_sample": False, "temperature": 0.6})
    convert(folder, tmp_path / "out.mlb")
    assert read_sidecar(tmp_path / "out.json").sampling == {"temperature": 0.0}


def test_validate_compares_the_sidecars_hash(tmp_path: Path) -> None:
    convert(write(tmp_path / "m"), tmp_path / "out.mlb")
    assert validate(tmp_path / "out.mlb").valid
    data = bytearray((tmp_path / "out.mlb").read_bytes())
    data[-100] ^= 1
    (tmp_path / "out.mlb").write_bytes(data)
    (fault,) = validate(tmp_path / "out.mlb").faults
    assert fault.message.startswith("SHA-256 in out.json is ")


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    for name in ("out.mlb", "out.json", "out.mlt"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(FileError, match=f"{name} exists already; --force overwrites it"):
            convert(folder, tmp_path / "out.mlb")
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    convert(folder, tmp_path / "out.mlb")
    convert(folder, tmp_path / "out.mlb", force=True)


def test_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none does not exist; convert takes a Hugging Face folder"):
        convert(tmp_path / "none")
    with pytest.raises(FileError, match=r"no config.json; convert takes a Hugging Face folder"):
        convert(tmp_path)
    with pytest.raises(FileError, match=r"the folder .*nowhere does not exist"):
        convert(write(tmp_path / "m"), tmp_path / "nowhere" / "out.mlb")


@pytest.mark.parametrize("name", ["x.json", "x.mlt", "x", "x.gguf"])
def test_the_name_of_a_model_ends_with_mlb(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"a model's name ends with .mlb"):
        convert(write(tmp_path / "m"), tmp_path / name)


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    weights = tensors()
    weights["lm_head.weight"][0, 0] = np.nan  # the last tensor of the file
    folder = write(tmp_path / "m", weights=weights)
    out = tmp_path / "out"
    out.mkdir()
    assert run(["convert", str(folder), "-o", str(out / "x.mlb")]) == 1
    assert list(out.iterdir()) == []


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "m")
    out = tmp_path / "out"
    out.mkdir()
    assert run(["convert", str(folder), "-o", str(out / "x.mlb"), "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert list(out.iterdir()) == []
    assert run(["convert", str(folder), "-o", str(out / "x.mlb"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert planned["bytes"] == written["bytes"] == (out / "x.mlb").stat().st_size
    assert sorted(written["sidecars"]) == sorted(str(p) for p in out.iterdir() if p.suffix != ".mlb")
    assert (planned["dry_run"], written["dry_run"]) == (True, False)
    assert written["bits_per_weight"] == pytest.approx(8 * written["bytes"] / written["weights"])


def test_default_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "Tiny-1B")
    monkeypatch.chdir(tmp_path)
    assert run(["convert", str(folder), "--wtype", "q8", "--quiet"]) == 0
    assert (tmp_path / "Tiny-1B-q8.mlb").exists()
    assert run(["convert", f"{folder}/", "--quiet"]) == 0
    assert (tmp_path / "Tiny-1B-q4.mlb").exists()


@pytest.mark.parametrize(("scales", "bits"), [("f16", 4.5), ("f32", 5.0)])
def test_scales(tmp_path: Path, scales: str, bits: float) -> None:
    convert(write(tmp_path / "m"), tmp_path / "out.mlb", options=Options("q4", scales))
    spec = open_mlb(tmp_path / "out.mlb").tensors["layers.0.w1"]
    assert 8 * spec.total_bytes / spec.n_weights == bits


def test_max_seq(tmp_path: Path) -> None:
    folder, remarks = write(tmp_path / "m"), Remarks()
    assert convert(folder, tmp_path / "a.mlb", options=Options(max_seq=64)).plan.header.max_seq == 64
    convert(folder, tmp_path / "b.mlb", options=Options(max_seq=1024), progress=remarks)
    assert "--max-seq 1024 is more than the 128 positions that the model was made for" in remarks.texts


def test_rule_is_the_familys_or_the_users(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    fit = convert(folder, tmp_path / "fit.mlb")
    rounded = convert(folder, tmp_path / "round.mlb", options=Options(q4_rule="round"))
    best = convert(folder, tmp_path / "best.mlb", options=Options(q4_rule="best"))
    assert (fit.q4_rule, rounded.q4_rule, best.q4_rule) == ("fit", "round", "best")
    assert len({(tmp_path / f"{rule}.mlb").read_bytes() for rule in ("fit", "round", "best")}) == 3
    with pytest.raises(UsageError, match="no Q4_0 rule is called 'nearest'; there are fit, round, best"):
        convert(folder, tmp_path / "x.mlb", options=Options(q4_rule="nearest"))


def test_without_a_tokenizer_there_is_a_warning(tmp_path: Path) -> None:
    remarks = Remarks()
    convert(write(tmp_path / "m"), tmp_path / "out.mlb", progress=remarks)
    assert any("the model is written without a tokenizer" in t for t in remarks.texts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out.json", "out.mlb"]


def test_the_demo_checkpoint(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    result = convert(folder, tmp_path / "out.mlb")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo", "out.json", "out.mlb", "out.mlt"]
    assert all(validate(p).valid for p in (tmp_path / "out.mlb", tmp_path / "out.mlt"))
    assert result.plan.family.name == "qwen3"


def test_any_number_of_threads_and_parts_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m", CONFIG | {"intermediate_size": 172})
    whole = convert(folder, tmp_path / "a.mlb", threads=1, measure=True)
    monkeypatch.setattr("krafla_cli.convert.tensors._WEIGHTS_PER_PART", 1024)  # 16 rows of 64
    monkeypatch.setattr("krafla_cli.convert.stream._WEIGHTS_AHEAD", 5000)
    parts = convert(folder, tmp_path / "b.mlb", threads=3, measure=True)
    assert (tmp_path / "a.mlb").read_bytes() == (tmp_path / "b.mlb").read_bytes()
    for name, errors in whole.errors.items():
        assert parts.errors[name].relative == pytest.approx(errors.relative, rel=1e-12)


def test_a_fault_is_named_by_its_row_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("krafla_cli.convert.tensors._WEIGHTS_PER_PART", 1024)
    weights = tensors()
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name][37, 5] = np.inf
    with pytest.raises(DataError, match=rf"{name}: row 37, column 5: \+inf is not finite"):
        convert(write(tmp_path / "m", weights=weights), tmp_path / "x.mlb")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
