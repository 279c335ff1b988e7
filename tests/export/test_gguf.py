"""``mlb export --to gguf``: blocks bit for bit, what the gguf package reads, and the way back."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from krafla_cli.cli import invoke
from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.errors import FileError, FormatError, UnsupportedError
from krafla_cli.export.pipeline import export
from krafla_cli.formats.gguf import validate
from krafla_cli.formats.mlb import Header
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.formats.sidecar import read_sidecar
from tests.convert.test_pipeline import DEMO, Remarks
from tests.helpers import models
from tests.helpers.checkpoints import CHECKPOINTS, load_dequantized, random_model, save
from tests.helpers.gguf_models import (
    GGUF_CHECKPOINTS,
    architecture,
    assert_same_model,
    gguf_tensors,
    seeded_model,
    write_metadata,
)

# Mistral's window is read by no architecture of its structure; Phi-3 has one here too.
REFUSED = {"mistral", "phi3"}
# Value heads narrower than a block change places in lout, which is written as float32.
NOT_IN_BLOCKS = {"qwen3_5-narrow-heads"}
EXPORTED = [name for name in GGUF_CHECKPOINTS if name not in REFUSED | NOT_IN_BLOCKS]


def converted(model: Any, folder: Path, **options: Any) -> Any:
    return convert(save(model, folder / "hf"), folder / "m.mlb", options=Options(**options))


@pytest.mark.parametrize("name", EXPORTED)
def test_there_and_back_is_the_same_file(name: str, tmp_path: Path) -> None:
    """Without any option: the types of the blocks say which model it was."""
    for wtype, mask in (("q4", 0), ("q8", 0), ("q4", 8 | 64)):
        converted(seeded_model(name), tmp_path, wtype=wtype, q8_mask=mask)
        export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf", force=True)
        assert not validate(tmp_path / "m.gguf").faults
        assert not validate(tmp_path / "m.gguf").warnings
        convert(tmp_path / "m.gguf", tmp_path / "back.mlb", force=True)
        assert_same_model(tmp_path / "back.mlb", tmp_path / "m.mlb")
        (tmp_path / "m.mlb").unlink()
        (tmp_path / "m.json").unlink()


@pytest.mark.parametrize("name", [n for n in EXPORTED if n not in ("glm4", "ernie4_5", "seed_oss")])
def test_holds_what_llama_cpps_converter_would_write(name: str, tmp_path: Path) -> None:
    """Tensors of the model with the stored weights, and metadata, as the gguf package reads them."""
    model = seeded_model(name)
    result = converted(model, tmp_path, wtype="q4")
    export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf")
    load_dequantized(model, result)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    want = gguf_tensors(model)
    assert tensors.keys() == want.keys()
    hidden = result.plan.header.hidden_dim
    for key, values in want.items():
        padded = np.zeros(tensors[key].shape, np.float32)
        padded[tuple(slice(n) for n in values.shape)] = values
        assert values.shape == padded.shape or hidden != model.config.intermediate_size
        # 1 + w and back may round once
        np.testing.assert_allclose(tensors[key], padded, rtol=3e-7, atol=0, err_msg=key)
    writer = gguf.GGUFWriter(None, architecture(model))
    write_metadata(writer, model.config, architecture(model))
    (expected,) = writer.kv_data
    for key, entry in expected.items():
        if key.endswith("feed_forward_length"):
            assert reader.fields[key].contents() == hidden
        elif key.endswith("sliding_window_pattern"):
            assert list(reader.fields[key].contents()) == list(entry.value)
        elif isinstance(entry.value, float):
            assert reader.fields[key].contents() == pytest.approx(entry.value, rel=1e-6), key
        else:
            assert reader.fields[key].contents() == entry.value, key


@pytest.mark.parametrize("wtype", ["q4", "q8"])
def test_blocks_are_those_of_the_model(wtype: str, tmp_path: Path) -> None:
    """Scale and quants of a block, byte by byte; w2 has no row order to change."""
    converted(seeded_model("qwen3"), tmp_path, wtype=wtype)
    export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf")
    matrix = open_mlb(tmp_path / "m.mlb").quantized("layers.1.w2")
    tensor = next(t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.1.ffn_down.weight")
    n_quants = 16 if wtype == "q4" else 32
    blocks = tensor.data.reshape(64, 3, 2 + n_quants)
    assert blocks[5, 2, :2].tobytes() == matrix.d[5, 2].tobytes()
    assert blocks[5, 2, 2:].tobytes() == matrix.q[5, 2 * n_quants : 3 * n_quants].tobytes()


def test_yarn_with_a_factor_of_its_own(tmp_path: Path) -> None:
    checkpoint = CHECKPOINTS["qwen3-yarn"]
    rope = checkpoint.settings["rope_parameters"] | {"attention_factor": 1.3}
    checkpoint = dataclasses.replace(checkpoint, settings=checkpoint.settings | {"rope_parameters": rope})
    converted(random_model(checkpoint, 0), tmp_path, wtype="q8")
    export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf")
    usual = 0.1 * np.log(4.0) + 1
    stored = gguf.GGUFReader(tmp_path / "m.gguf").fields["qwen3.rope.scaling.attn_factor"].contents()
    assert stored == pytest.approx(1.3 / usual, rel=1e-6)
    convert(tmp_path / "m.gguf", tmp_path / "back.mlb")
    assert (tmp_path / "back.mlb").read_bytes() == (tmp_path / "m.mlb").read_bytes()


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_llama3_parameters_are_found_without_our_note(theta: float, tmp_path: Path) -> None:
    """rope_freqs.weight alone gives the usual parameters back; with few blended pairs, some of the same effect."""
    from krafla_cli.rope import inverse_frequencies, llama3_divisors, llama3_of_divisors

    for factor, original, dim in ((8.0, 8192, 128), (32.0, 8192, 64), (8.0, 64, 16), (2.5, 300, 24)):
        header = dataclasses.replace(
            models.HEADERS["llama3"], head_dim=dim, rope_theta=theta, rope_factor=factor, rope_orig_max_seq=original
        )
        divisors = llama3_divisors(header).astype(np.float32).astype(np.float64)
        found = llama3_of_divisors(divisors, theta, dim)
        if (divisors == 1).all():
            continue
        assert found is not None
        if dim > 24:
            assert found == (factor, 1.0, 4.0, original)
        again = dataclasses.replace(
            header,
            rope_factor=found.factor,
            rope_low_freq_factor=found.low,
            rope_high_freq_factor=found.high,
            rope_orig_max_seq=round(found.original),
        )
        np.testing.assert_allclose(inverse_frequencies(again), inverse_frequencies(header), rtol=1e-5)


def test_a_false_note_is_not_believed(tmp_path: Path) -> None:
    converted(seeded_model("llama3"), tmp_path, wtype="q8")
    export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    note = np.float32([8, 1, 4, 64]).tobytes()
    assert note in data
    (tmp_path / "m.gguf").write_bytes(data.replace(note, np.float32([8, 1, 4, 640]).tobytes()))
    convert(tmp_path / "m.gguf", tmp_path / "back.mlb")
    assert open_mlb(tmp_path / "back.mlb").header.rope_orig_max_seq == 64


# ---------------------------------------------------------------------------------------------------------------------
# Scales, tokenizers, settings


def test_f32_scales_are_rounded_and_the_error_is_told(tmp_path: Path) -> None:
    model = seeded_model("llama")
    converted(model, tmp_path, wtype="q8", scales="f32")
    remarks = Remarks()
    export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf", progress=remarks)
    (remark,) = [r for r in remarks.texts if r.startswith("float32 scales")]
    stored, exact = [], []
    mlb = open_mlb(tmp_path / "m.mlb")
    names = {"tok_emb": "token_embd.weight", "wcls": "output.weight"}
    reader = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for role, name in names.items():
        matrix = mlb.quantized(role)
        exact.append(matrix.q.reshape(-1, 32) * matrix.d.reshape(-1, 1))
        stored.append(reader[name].reshape(-1, 32))
    error = np.linalg.norm(np.concatenate(stored) - np.concatenate(exact)) / np.linalg.norm(np.concatenate(exact))
    told = float(remark.split()[-1])
    assert "float32 scales of 23 matrices were rounded to f16" in remark
    assert told == pytest.approx(error, rel=0.2)


def test_f32_scales_beyond_f16(tmp_path: Path) -> None:
    header = models.tiny(scale_f16=0)
    arrays = models.random_arrays(header)
    arrays["layers.1.w2"][0, 0] = 1e8
    models.write_model(tmp_path / "m.mlb", header, arrays)
    with pytest.raises(FormatError, match=r"blk.1.ffn_down.weight: a scale of 787402 is beyond what f16 holds"):
        export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["m.mlb"]


@pytest.mark.parametrize("wtype", ["q4", "q8"])
def test_the_demo_model(wtype: str, tmp_path: Path) -> None:
    convert(DEMO, tmp_path / "a.mlb", options=Options(wtype))
    export(tmp_path / "a.mlb", "gguf", tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path / "b.mlb")
    for suffix in ("mlb", "mlt"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    a, b = (read_sidecar(tmp_path / f"{n}.json") for n in "ab")
    assert (a.chat_template, a.stop_ids, a.sampling) == (b.chat_template, b.stop_ids, b.sampling)
    export(tmp_path / "b.mlb", "gguf", tmp_path / "b.gguf")
    fields = [
        {k: f.contents() for k, f in gguf.GGUFReader(tmp_path / f"{n}.gguf").fields.items() if k != "general.name"}
        for n in "ab"
    ]
    assert fields[0] == fields[1]
    assert fields[0]["tokenizer.ggml.pre"] == "qwen2"
    assert fields[0]["tokenizer.ggml.eos_token_id"] == 2


def test_a_tokenizer_json_comes_back_as_it_was(tmp_path: Path) -> None:
    """One that .mlt cannot hold: a byte has no token."""
    model = seeded_model("llama")
    folder = save(model, tmp_path / "hf")
    document = json.loads((DEMO / "tokenizer.json").read_text())
    document["model"]["vocab"] = {"a": 0, "b": 1, "ab": 2, "<|end|>": 3}
    document["model"]["merges"] = ["a b"]
    document["added_tokens"] = [document["added_tokens"][0] | {"id": 3, "content": "<|end|>"}]
    (folder / "tokenizer.json").write_text(json.dumps(document, indent=3))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    convert(folder, tmp_path / "a.mlb")
    export(tmp_path / "a.mlb", "gguf", tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path / "b.mlb")
    assert (tmp_path / "b.tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    tokens = gguf.GGUFReader(tmp_path / "a.gguf").fields["tokenizer.ggml.tokens"].contents()
    assert tokens[:5] == ["a", "b", "ab", "<|end|>", "[PAD4]"]
    assert len(tokens) == 101


def test_without_a_tokenizer(tmp_path: Path) -> None:
    converted(seeded_model("llama"), tmp_path, wtype="q8")
    remarks = Remarks()
    export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf", progress=remarks)
    assert any("no tokenizer beside it: the file is written without one" in r for r in remarks.texts)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "no_vocab"
    assert fields["llama.vocab_size"].contents() == 101


def test_more_stop_tokens_than_places(tmp_path: Path) -> None:
    convert(DEMO, tmp_path / "m.mlb")
    settings = json.loads((tmp_path / "m.json").read_text()) | {"stop_ids": [0, 2, 5, 9]}
    (tmp_path / "m.json").write_text(json.dumps(settings))
    remarks = Remarks()
    export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf", progress=remarks)
    assert "warning: GGUF has places for three stop tokens; left out: 9" in remarks.texts
    convert(tmp_path / "m.gguf", tmp_path / "b.mlb")
    assert read_sidecar(tmp_path / "b.json").stop_ids == (0, 2, 5)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mistral", "the nearest is llama, but the model has a window of 9 positions"),
        ("ministral", "the nearest is llama, but the model has a window of 9 positions"),
        ("phi3", "the nearest is llama, but the model has a window of 9 positions"),
        ("qwen2-window", "the nearest is qwen2, but the model has a window of 9 positions"),
        ("glm", "the nearest is glm4, but the model has no norms after attention and FFN"),
        (
            "qwen3_5-mixed",
            "the nearest is qwen35, but the model has layers of full attention that are not every n-th one",
        ),
        ("gemma2", "the nearest is gemma2, but the model has an attention scale of 0.301511"),
        ("smollm3", "the model has RoPE left out in layer 1"),
        ("qwen3-yarn-factor", "the model has yarn with beta_fast 16 and beta_slow 1"),
    ],
)
def test_what_gguf_cannot_hold_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    mixed = {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
    checkpoint = CHECKPOINTS[name.removesuffix("-mixed")]
    if name.endswith("-mixed"):
        checkpoint = dataclasses.replace(checkpoint, settings=checkpoint.settings | mixed)
    converted(random_model(checkpoint, 0), tmp_path, wtype="q8")
    with pytest.raises(UnsupportedError, match=f"m.mlb: GGUF has no architecture for this model; .*{message}"):
        export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


BASE = {"qk_norm": 1}
LLAMA3 = {"rope_type": 1, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_orig_max_seq": 64}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (models.tiny(**BASE, qkv_bias=1), "biases of q, k, v"),
        (models.tiny(**BASE, final_softcap=3.0), "a soft cap of logits"),
        (models.tiny(**BASE, embed_scale=2.0), "a factor of 2 on embeddings"),
        (dataclasses.replace(models.HEADERS["gemma3"], **LLAMA3), "the nearest is gemma3, but .* RoPE scaling llama3"),
        (models.tiny(**BASE, rope_type=2, rope_factor=2.0, rot_dim=8), "RoPE on 8 of 16 dimensions"),
        (dataclasses.replace(models.HEADERS["gemma2"], attn_scale=0.0, shared_classifier=0), "a classifier of its own"),
        (dataclasses.replace(models.HEADERS["gemma3"], flags=bytes([1, 3, 0])), "a RoPE base of their own on other"),
    ],
)
def test_headers_that_no_architecture_holds(header: Header, message: str, tmp_path: Path) -> None:
    models.random_model(tmp_path / "m.mlb", header)
    with pytest.raises(UnsupportedError, match=message):
        export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf")


def test_a_window_as_long_as_the_context_changes_nothing(tmp_path: Path) -> None:
    models.random_model(tmp_path / "m.mlb", models.tiny(sliding_window=256))
    export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "back.mlb")
    assert (tmp_path / "back.mlb").read_bytes() == (tmp_path / "m.mlb").read_bytes()


def test_output_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(seeded_model("llama"), tmp_path, wtype="q8")
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(FileError, match=r"m.gguf exists already; --force overwrites it"):
        export(tmp_path / "m.mlb", "gguf", tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_text() == "mine"
    with pytest.raises(FileError, match="it is the input itself"):
        export(tmp_path / "m.mlb", "gguf", tmp_path / "m.mlb", force=True)

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    before = sorted(p.name for p in tmp_path.iterdir())
    monkeypatch.setattr("krafla_cli.export.gguf.blocks", full)
    with pytest.raises(FileError, match=r"cannot write .*n.gguf: No space left on device"):
        export(tmp_path / "m.mlb", "gguf", tmp_path / "n.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    assert invoke(["convert", str(DEMO), "-o", "demo.mlb"]) == 0
    assert invoke(["export", "demo.mlb", "--to", "gguf"]) == 0
    assert invoke(["validate", "demo.gguf"]) == 0
    assert invoke(["inspect", "demo.gguf"]) == 0
    assert "architecture     qwen3" in capsys.readouterr().out
