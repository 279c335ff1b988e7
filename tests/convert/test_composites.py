"""The language model inside image-text checkpoints: found by text_config and prefix, vision and extras left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.errors import FormatError
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.runtime.engine import EngineOptions
from krafla_cli.runtime.engines import open_engine
from tests.convert.test_families import N_IDS, close
from tests.convert.test_pipeline import Remarks
from tests.helpers.checkpoints import CHECKPOINTS, VOCAB, edit_config, load_dequantized, random_model, save

_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def composite(text: Any) -> Any:
    """An image-text model around the language model ``text``, whose weights it takes."""
    if text.config.model_type == "gemma3_text":
        vision = transformers.SiglipVisionConfig(**_VISION, image_size=28, patch_size=14)
        config = transformers.Gemma3Config(text_config=text.config, vision_config=vision, mm_tokens_per_image=4)
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
        config = transformers.Qwen3_5Config(
            text_config=text.config.to_dict(), vision_config=vision, tie_word_embeddings=False
        )
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


def rename(folder: Path, old: str, new: str) -> None:
    """Moves every tensor from prefix ``old`` to ``new``, as checkpoints of other releases have them."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(
        {k.replace(old, new, 1) if k.startswith(old) else k: v for k, v in tensors.items()}, path
    )


def check(folder: Path, text: Any, tmp_path: Path, progress: Remarks) -> None:
    result = convert(folder, tmp_path / "m.mlb", options=Options("q8"), progress=progress)
    reference = convert(save(text, tmp_path / "text"), tmp_path / "text.mlb", options=Options("q8"))
    assert (tmp_path / "m.mlb").read_bytes() == (tmp_path / "text.mlb").read_bytes()
    load_dequantized(text, reference)
    ids = np.random.default_rng(0).integers(0, VOCAB, N_IDS)
    with torch.no_grad():
        want = text(torch.from_numpy(ids)[None]).logits[0].numpy()
    engine = open_engine(open_mlb(result.output), EngineOptions(N_IDS, activations="f32", kv="f32"), "reference")
    close(engine.forward(ids, "all"), want)


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_language_model_of_an_image_text_checkpoint(name: str, old_names: bool, tmp_path: Path) -> None:
    text = random_model(CHECKPOINTS[name], 0)
    folder = save(composite(text), tmp_path / "hf")
    prefixes = {
        k.split("layers.")[0] for k in safetensors.torch.load_file(folder / "model.safetensors") if ".layers.0." in k
    }
    current = next(p for p in prefixes if "language_model" in p)
    other = "language_model.model." if current == "model.language_model." else "model.language_model."
    if old_names:
        rename(folder, current, other)
    remarks = Remarks()
    check(folder, text, tmp_path, remarks)
    assert any(t.startswith("left out: ") and "vis" in t for t in remarks.texts)


def test_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    text = random_model(CHECKPOINTS["qwen3_5"], 0)
    folder = save(text, tmp_path / "hf")
    path = folder / "model.safetensors"
    extra = {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.input_layernorm.weight": torch.ones(2)}
    safetensors.torch.save_file(safetensors.torch.load_file(path) | extra, path)
    remarks = Remarks()
    result = convert(folder, tmp_path / "m.mlb", progress=remarks)
    assert "left out: mtp, 2 tensors" in remarks.texts
    assert result.plan.header.n_layers == 3


def test_qwen3_5_norms_are_folded_once(tmp_path: Path) -> None:
    text = random_model(CHECKPOINTS["qwen3_5"], 0)
    convert(save(text, tmp_path / "hf"), tmp_path / "m.mlb")
    model = open_mlb(tmp_path / "m.mlb")
    layer = text.model.layers[0]
    assert np.array_equal(model.float32("layers.0.attn_norm"), 1 + layer.input_layernorm.weight.detach().numpy())
    assert np.array_equal(model.float32("layers.0.lnorm"), layer.linear_attn.norm.weight.detach().numpy())
    assert np.array_equal(model.float32("layers.0.A_log"), layer.linear_attn.A_log.detach().numpy())
    taps = layer.linear_attn.conv1d.weight.detach().numpy()[:, 0]
    assert np.array_equal(model.float32("layers.0.lconv"), taps)


def test_new_and_old_config_give_the_same_header(tmp_path: Path) -> None:
    text = random_model(CHECKPOINTS["gemma3"], 0)
    folder = save(text, tmp_path / "hf")
    new = convert(folder, tmp_path / "new.mlb").plan.header
    edit_config(
        folder,
        rope_parameters=...,
        rope_theta=100000.0,
        rope_local_base_freq=1000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert convert(folder, tmp_path / "old.mlb").plan.header == new


@pytest.mark.parametrize("theta", [0.0, 1e-50])
def test_a_local_base_that_the_format_cannot_hold(theta: float, tmp_path: Path) -> None:
    folder = save(random_model(CHECKPOINTS["gemma3"], 0), tmp_path / "hf")
    edit_config(folder, rope_parameters=..., rope_local_base_freq=theta)
    with pytest.raises(FormatError, match=r"flags of layer 0: local RoPE \(2\) needs rope_local_theta > 0"):
        convert(folder, tmp_path / "m.mlb")
