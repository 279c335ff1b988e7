"""``mlb export --to safetensors``: a folder that transformers loads, with the logits of the reference engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import transformers
from tokenizers import Tokenizer

from krafla_cli.cli import invoke
from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.errors import FileError, FormatError, UnsupportedError
from krafla_cli.export.pipeline import export
from krafla_cli.export.safetensors import bfloat16_bits
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.runtime.engine import EngineOptions
from krafla_cli.runtime.engines import open_engine
from krafla_cli.tokenizer import load_tokenizer
from tests.convert.test_pipeline import DEMO
from tests.helpers import models
from tests.helpers.checkpoints import CHECKPOINTS, VOCAB, random_model, save

N_IDS = 40  # longer than every window
# One for each way in which a config is rebuilt from the header.
REBUILT = (
    *("llama", "llama-tied", "llama3", "llama-linear", "mistral", "ministral", "qwen2", "qwen2-window", "qwen3"),
    *("qwen3-yarn-factor", "gemma2", "gemma3", "smollm3-window", "qwen3_5", "glm", "glm4"),
)


def converted(name: str, folder: Path, seed: int = 0, **options: Any) -> Path:
    model = random_model(CHECKPOINTS[name], seed)
    convert(save(model, folder / "hf"), folder / "m.mlb", options=Options(**{"wtype": "q8"} | options))
    return folder / "m.mlb"


def reference_logits(path: Path, ids: np.ndarray) -> np.ndarray:
    options = EngineOptions(len(ids), activations="f32", kv="f32")
    return np.asarray(open_engine(open_mlb(path), options, "reference").forward(ids, "all"))


def transformers_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        return np.asarray(model.eval()(torch.from_numpy(ids)[None]).logits[0])


def check_logits(path: Path, folder: Path, seed: int = 0) -> None:
    ids = np.random.default_rng(seed).integers(0, VOCAB, N_IDS)
    want = transformers_logits(folder, ids)
    assert np.abs(reference_logits(path, ids) - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_family(name: str, tmp_path: Path) -> None:
    path = converted(name, tmp_path)
    export(path, "safetensors", tmp_path / "out")
    check_logits(path, tmp_path / "out")


@pytest.mark.parametrize("name", REBUILT)
def test_without_settings_the_config_is_rebuilt(name: str, tmp_path: Path) -> None:
    path = converted(name, tmp_path, wtype="q4", scales="f32")
    (tmp_path / "m.json").unlink()
    export(path, "safetensors", tmp_path / "out")
    check_logits(path, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_family_over_more_seeds(name: str, seed: int, tmp_path: Path) -> None:
    path = converted(name, tmp_path, seed, wtype="q4")
    export(path, "safetensors", tmp_path / "out")
    check_logits(path, tmp_path / "out", seed)


def test_tensors_have_the_checkpoints_names_and_shapes(tmp_path: Path) -> None:
    """Padding is cut off, fused matrices are whole again, a convolution has its middle axis."""
    for name in ("llama-ffn172", "phi3", "qwen3_5"):
        folder = tmp_path / name
        export(converted(name, folder), "safetensors", folder / "out")
        shapes = []
        for source in ("hf", "out"):
            with safetensors.safe_open(folder / source / "model.safetensors", "np") as file:
                shapes.append({k: tuple(file.get_slice(k).get_shape()) for k in file.keys()})  # noqa: SIM118
        assert shapes[0] == shapes[1]


def test_bf16_is_the_nearest(tmp_path: Path) -> None:
    path = converted("qwen3", tmp_path)
    for dtype in ("f32", "bf16"):
        export(path, "safetensors", tmp_path / dtype, dtype=dtype)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    exact, rounded = (safetensors.torch.load_file(tmp_path / d / "model.safetensors") for d in ("f32", "bf16"))
    for name, values in exact.items():
        assert rounded[name].dtype == torch.bfloat16
        assert torch.equal(values.to(torch.bfloat16), rounded[name]), name


def test_bfloat16_ties_to_even() -> None:
    values = np.float32([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 0.0, -0.0, 3e38, 1e-40])
    want = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().astype(np.uint16)
    np.testing.assert_array_equal(bfloat16_bits(values), want)


# ---------------------------------------------------------------------------------------------------------------------
# The other files


def test_the_demo_model(tmp_path: Path) -> None:
    convert(DEMO, tmp_path / "demo.mlb", options=Options("q8"))
    result = export(tmp_path / "demo.mlb", "safetensors", tmp_path / "out")
    assert sorted(p.name for p in result.files) == sorted(p.name for p in (tmp_path / "out").iterdir())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    source = transformers.AutoTokenizer.from_pretrained(DEMO, local_files_only=True)
    text = "<|im_start|>user\nOnce upon a time, 123 rabbits!<|im_end|>"
    assert tokenizer(text).input_ids == source(text).input_ids
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == source.apply_chat_template(
        messages, tokenize=False
    )
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    generation, original = (json.loads((f / "generation_config.json").read_text()) for f in (tmp_path / "out", DEMO))
    assert sorted(generation["eos_token_id"]) == sorted(original["eos_token_id"])
    assert (generation["temperature"], generation["top_k"]) == (original["temperature"], original["top_k"])
    # Converted again it is the same model: levels and scales come back as they were.
    convert(tmp_path / "out", tmp_path / "again.mlb", options=Options("q8"))
    assert (tmp_path / "again.mlt").read_bytes() == (tmp_path / "demo.mlt").read_bytes()
    assert open_mlb(tmp_path / "again.mlb").header == open_mlb(tmp_path / "demo.mlb").header


def test_a_tokenizer_json_is_copied(tmp_path: Path) -> None:
    path = converted("llama", tmp_path)
    text = (DEMO / "tokenizer.json").read_text("utf-8")
    (tmp_path / "m.tokenizer.json").write_text(text, "utf-8")
    export(path, "safetensors", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text("utf-8") == text


def test_another_tokenizer(tmp_path: Path) -> None:
    path = converted("llama", tmp_path)
    export(path, "safetensors", tmp_path / "out", tokenizer=DEMO / "tokenizer.json")
    ids = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("hello").ids
    assert ids == load_tokenizer(DEMO).encode("hello").ids
    with pytest.raises(FileError, match="No such file"):
        export(path, "safetensors", tmp_path / "out2", tokenizer=tmp_path / "none.mlt")


def test_the_language_model_of_an_image_text_checkpoint(tmp_path: Path) -> None:
    path = converted("gemma3", tmp_path)
    settings = json.loads((tmp_path / "m.json").read_text())
    config = settings["provenance"]["config"]
    composite = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {},
                 "text_config": config}  # fmt: skip
    settings["provenance"]["config"] = composite
    (tmp_path / "m.json").write_text(json.dumps(settings))
    export(path, "safetensors", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert "vision_config" not in written
    check_logits(path, tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# Refusals, and output that is complete or absent


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = converted("llama", tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    with pytest.raises(FileError, match=r"config.json exists already; --force overwrites it"):
        export(path, "safetensors", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["config.json"]
    assert (tmp_path / "out" / "config.json").read_text() == "mine"
    export(path, "safetensors", tmp_path / "out", force=True)
    check_logits(path, tmp_path / "out")


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = converted("llama", tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("krafla_cli.export.safetensors.dense", full)
    with pytest.raises(FileError, match=r"cannot write .*model.safetensors: No space left on device"):
        export(path, "safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_of_another_model(tmp_path: Path) -> None:
    path = converted("llama", tmp_path)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"m.json is not this model's: its SHA-256 is another one"):
        export(path, "safetensors", tmp_path / "out")


def test_settings_that_contradict_the_header(tmp_path: Path) -> None:
    path = converted("llama", tmp_path)
    settings = json.loads((tmp_path / "m.json").read_text())
    settings["provenance"]["config"]["intermediate_size"] = 4000
    (tmp_path / "m.json").write_text(json.dumps(settings))
    with pytest.raises(FormatError, match=r"m.json: intermediate_size 4000 does not fit the model's 96"):
        export(path, "safetensors", tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": 1, "qk_norm": 1}, "like qwen3 and has biases of q, k, v"),
        ({"qk_norm": 1, "rot_dim": 4}, "like glm and has q/k norms"),
        ({"attn_scale": 0.3}, "like llama and has an attention scale"),
        ({"act": 1}, "like gemma2 and lacks norms after attention and FFN, scaled embeddings"),
        ({"act": 1, "post_norms": 1, "embed_scale": 3.0}, "embeddings scaled by another factor than sqrt"),
        ({"attn_softcap": 5.0}, "like llama and has a soft cap of scores"),
    ],
)
def test_models_that_are_like_no_family(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    models.random_model(tmp_path / "m.mlb", models.tiny(**changes))
    with pytest.raises(UnsupportedError, match=message):
        export(tmp_path / "m.mlb", "safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gemma_needs_a_whole_scalar(tmp_path: Path) -> None:
    header = dataclasses.replace(models.HEADERS["gemma2"], attn_scale=0.3)
    models.random_model(tmp_path / "m.mlb", header)
    with pytest.raises(
        UnsupportedError, match=r"query_pre_attn_scalar is a whole number; this model's would be 11.1111"
    ):
        export(tmp_path / "m.mlb", "safetensors", tmp_path / "out")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    converted("llama", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert invoke(["export", "m.mlb", "--to", "safetensors", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["output"] == "m-hf"
    assert document["files"][-1] == "m-hf/model.safetensors"
    assert invoke(["export", "m.mlb", "--to", "gguf", "--dtype", "bf16"]) == 2
    assert "--dtype is for --to safetensors" in capsys.readouterr().err
    assert invoke(["export", "none.mlb", "--to", "gguf"]) == 1
    assert capsys.readouterr().err.startswith("mlb: error: cannot open none.mlb")
