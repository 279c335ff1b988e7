"""GGUF files as sources: the same .mlb as from the checkpoint, blocks copied, tokenizers, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from krafla_cli.cli import invoke as run
from krafla_cli.convert import checkpoint
from krafla_cli.convert.gguf_config import gguf_config
from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.errors import DataError, FileError, FormatError, MlbError, ShapeError, UnsupportedError, UsageError
from krafla_cli.formats.gguf import open_gguf
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.formats.sidecar import read_sidecar
from krafla_cli.quant.matrix import dequantize
from krafla_cli.rope import interleaved_order
from krafla_cli.tokenizer import load_tokenizer
from tests.convert.test_pipeline import DEMO, Remarks
from tests.helpers.checkpoints import save
from tests.helpers.gguf_bytes import ARCHITECTURE, description, pair
from tests.helpers.gguf_bytes import gguf as gguf_file
from tests.helpers.gguf_models import (
    GGUF_CHECKPOINTS,
    Types,
    assert_same_model,
    matrices_as,
    seeded_model,
    write_gguf,
)


@pytest.mark.parametrize("name", GGUF_CHECKPOINTS)
def test_gives_the_bytes_that_the_checkpoint_gives(name: str, tmp_path: Path) -> None:
    """From float32 tensors: header, row order, folded norms, fused matrices, everything."""
    model = seeded_model(name)
    convert(save(model, tmp_path / "hf"), tmp_path / "a.mlb", options=Options("q8"))
    convert(write_gguf(model, tmp_path / "m.gguf"), tmp_path / "b.mlb", options=Options("q8"))
    assert_same_model(tmp_path / "a.mlb", tmp_path / "b.mlb")


@pytest.mark.parametrize("kind", [Types.F16, Types.BF16])
def test_sixteen_bit_types(kind: Types, tmp_path: Path) -> None:
    model = seeded_model("qwen3")
    model = model.to(torch.float16 if kind == Types.F16 else torch.bfloat16)
    convert(save(model, tmp_path / "hf"), tmp_path / "a.mlb")
    convert(write_gguf(model, tmp_path / "m.gguf", matrices_as(kind)), tmp_path / "b.mlb")
    assert (tmp_path / "a.mlb").read_bytes() == (tmp_path / "b.mlb").read_bytes()


def gguf_weights(path: Path, name: str) -> np.ndarray:
    """A tensor as the gguf package reads and decodes it."""
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    return gguf.dequantize(tensor.data, tensor.tensor_type)


def mlb_weights(path: Path, name: str) -> np.ndarray:
    model = open_mlb(path)
    matrix = model.quantized(name)
    return dequantize(matrix.q, matrix.d, matrix.encoding, *matrix.shape)


@pytest.mark.parametrize("kind", [Types.Q4_0, Types.Q8_0])
@pytest.mark.parametrize(("name", "in_pairs"), [("llama", True), ("qwen3", False), ("phi3", False)])
def test_blocks_are_copied(name: str, in_pairs: bool, kind: Types, tmp_path: Path) -> None:
    """Same scales, same quants; only rows change places, where the file has them in halves."""
    remarks = Remarks()
    path = write_gguf(seeded_model(name), tmp_path / "m.gguf", matrices_as(kind))
    result = convert(path, tmp_path / "m.mlb", progress=remarks)
    matrices = [t for t in result.plan.tensors if t.spec.is_quantized]
    assert result.options.wtype == kind.name[:2].lower()
    assert f"copied block by block, without loss: {len(matrices)} of {len(matrices)} matrices" in remarks.texts
    h = open_mlb(tmp_path / "m.mlb").header
    for tensor in matrices:
        want = gguf_weights(path, tensor.source)
        if name == "phi3" and tensor.spec.role in ("wq", "wk", "wv"):
            start = {"wq": 0, "wk": h.q_dim, "wv": h.q_dim + h.kv_dim}[tensor.spec.role]
            want = want[start : start + tensor.spec.shape[0]]
        elif name == "phi3" and tensor.spec.role in ("w1", "w3"):
            want = np.split(want, 2)[tensor.spec.role == "w3"]
        if tensor.spec.role in ("wq", "wk") and not in_pairs:
            n_heads = h.n_heads if tensor.spec.role == "wq" else h.n_kv_heads
            want = want[interleaved_order(n_heads, h.head_size, h.head_size)]
        np.testing.assert_array_equal(mlb_weights(tmp_path / "m.mlb", tensor.spec.name), want)


def test_f32_scales_hold_copied_blocks_too(tmp_path: Path) -> None:
    path = write_gguf(seeded_model("llama"), tmp_path / "m.gguf", matrices_as(Types.Q4_0))
    for scales in ("f16", "f32"):
        convert(path, tmp_path / f"{scales}.mlb", options=Options("q4", scales))
    for spec in open_mlb(tmp_path / "f16.mlb").tensors.values():
        if spec.is_quantized:
            a, b = (mlb_weights(tmp_path / f"{s}.mlb", spec.name) for s in ("f16", "f32"))
            np.testing.assert_array_equal(a, b)


def test_classes_stay_in_q8_0(tmp_path: Path) -> None:
    """Without --wtype, classes all of whose matrices are Q8_0 stay so; with it, the user's word counts."""

    def choose(key: str, array: np.ndarray) -> Types:
        if array.ndim == 1:
            return Types.F32
        kept = key == "token_embd.weight" or "ffn_down" in key or key == "blk.0.attn_v.weight"
        return Types.Q8_0 if kept else Types.Q4_0

    path = write_gguf(seeded_model("llama"), tmp_path / "m.gguf", choose)
    remarks = Remarks()
    result = convert(path, tmp_path / "a.mlb", progress=remarks)
    assert (result.options.wtype, result.options.q8_mask) == ("q4", 1 | 64)  # tok_emb, down; v is mixed
    assert "quantized anew, with some loss: 1 from Q8_0" in remarks.texts
    assert read_sidecar(tmp_path / "a.json").provenance["options"]["q8_mask"] == 65
    assert convert(path, tmp_path / "b.mlb", options=Options("q4")).plan.header.q8_mask == 0
    assert convert(path, tmp_path / "c.mlb", options=Options(q8_mask=8)).plan.header.q8_mask == 8


@pytest.mark.parametrize(("n_float", "wtype"), [(0, "q8"), (1, "q8"), (2, "q8"), (7, "q4")])
def test_a_q8_0_model_with_some_floats_stays_q8(n_float: int, wtype: str, tmp_path: Path) -> None:
    """Matrices whose blocks did not fit are plain floats in files of this tool and of others."""
    names = ("attn_output", "ffn_down", "attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")

    def choose(key: str, array: np.ndarray) -> Types:
        return Types.F32 if array.ndim == 1 or any(n in key for n in names[:n_float]) else Types.Q8_0

    path = write_gguf(seeded_model("llama"), tmp_path / "m.gguf", choose)
    assert convert(path, tmp_path / "a.mlb").options.wtype == wtype


@pytest.mark.parametrize("kind", [Types.Q4_1, Types.Q5_0, Types.Q5_1])
def test_other_types_are_quantized_anew(kind: Types, tmp_path: Path) -> None:
    """As if the decoded weights had been the checkpoint's."""
    model = seeded_model("qwen3")
    path = write_gguf(model, tmp_path / "m.gguf", matrices_as(kind))
    convert(path, tmp_path / "a.mlb", options=Options("q8"))
    state = {k: gguf.dequantize(gguf.quantize(v.numpy(), kind), kind) if v.ndim == 2 else v.numpy()
             for k, v in model.state_dict().items()}  # fmt: skip
    model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()})
    convert(save(model, tmp_path / "hf"), tmp_path / "b.mlb", options=Options("q8"))
    assert (tmp_path / "a.mlb").read_bytes() == (tmp_path / "b.mlb").read_bytes()


def rewritten(path: Path, name: str, change: Any) -> Path:
    """``path`` with the bytes of one tensor changed in place."""
    info = open_gguf(path).tensors[name]
    data = bytearray(path.read_bytes())
    block = np.frombuffer(data, np.uint8, info.n_bytes, info.offset)
    change(block)
    path.write_bytes(data)
    return path


def test_q8_0_blocks_with_minus_128(tmp_path: Path) -> None:
    path = write_gguf(seeded_model("llama"), tmp_path / "m.gguf", matrices_as(Types.Q8_0))

    def change(data: np.ndarray) -> None:
        data[34 * 3 + 2 + 5] = 0x80  # block 3 is row 1, columns 32 on

    rewritten(path, "blk.1.ffn_up.weight", change)
    remarks = Remarks()
    result = convert(path, tmp_path / "m.mlb", progress=remarks)
    assert dict(result.requantized) == {"layers.1.w3": 1}
    assert "quantized anew: 1 Q8_0 block in 1 matrix, which held -128" in remarks.texts
    got, want = mlb_weights(tmp_path / "m.mlb", "layers.1.w3"), gguf_weights(path, "blk.1.ffn_up.weight")
    assert np.abs(got - want)[1, 32:64].max() <= np.abs(want[1, 32:64]).max() / 127
    changed = np.ones(got.shape, bool)
    changed[1, 32:64] = False
    np.testing.assert_array_equal(got[changed], want[changed])


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    path = write_gguf(seeded_model("qwen3"), tmp_path / "m.gguf", matrices_as(Types.Q4_0))

    def change(data: np.ndarray) -> None:
        data[18:20] = np.float16([np.inf]).view(np.uint8)

    rewritten(path, "blk.0.attn_q.weight", change)
    with pytest.raises(DataError, match=r"m.gguf: blk.0.attn_q.weight: row 0, column 32: its block has the scale inf"):
        convert(path, tmp_path / "m.mlb")
    assert not (tmp_path / "m.mlb").exists()


@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])  # it does not read the head size of others
def test_logits_equal_those_of_transformers_own_reading(name: str, tmp_path: Path) -> None:
    from krafla_cli.runtime.engine import EngineOptions
    from krafla_cli.runtime.engines import open_engine

    def tokens(writer: Any) -> None:  # transformers reads no model without them
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([chr(0x100 + i) for i in range(101)])
        writer.add_token_merges([])

    path = write_gguf(seeded_model(name), tmp_path / "m.gguf", matrices_as(Types.Q8_0), tokens)
    convert(path, tmp_path / "m.mlb")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ids = np.random.default_rng(1).integers(0, 101, 24)
    with torch.no_grad():
        want = model.eval()(torch.from_numpy(ids)[None]).logits[0].numpy()
    engine = open_engine(open_mlb(tmp_path / "m.mlb"), EngineOptions(24, activations="f32", kv="f32"), "reference")
    assert np.abs(engine.forward(ids, "all") - want).max() <= 1e-4 * np.abs(want).max()


# ---------------------------------------------------------------------------------------------------------------------
# Metadata


def test_config_of_metadata(tmp_path: Path) -> None:
    config = gguf_config(open_gguf(write_gguf(seeded_model("llama3"), tmp_path / "m.gguf")))
    assert config.raw["rope_scaling"] == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    assert config.raw["rms_norm_eps"] == 1e-6


def refuse(folder: Path, error: type[Exception], message: str, *pairs: bytes, tensors: tuple[bytes, ...] = ()) -> None:
    path = folder / "m.gguf"
    path.write_bytes(gguf_file([ARCHITECTURE, *pairs], list(tensors), bytes(64)))
    with pytest.raises(error, match=message):
        convert(path, folder / "m.mlb")
    assert not (folder / "m.mlb").exists()


SIZES = (
    pair("llama.embedding_length", 4, 64), pair("llama.attention.head_count", 4, 4), pair("llama.block_count", 4, 1),
    pair("llama.feed_forward_length", 4, 64), pair("llama.context_length", 4, 128),
    pair("llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
)  # fmt: skip


def test_refusals(tmp_path: Path) -> None:
    refuse(tmp_path, FormatError, "metadata llama.embedding_length is missing")
    refuse(
        tmp_path,
        FormatError,
        "llama.embedding_length at offset .* is of type string",
        pair("llama.embedding_length", 8, "x"),
    )
    refuse(tmp_path, UnsupportedError, "one of 3 parts of a split model; join them first", pair("split.count", 2, 3))
    refuse(
        tmp_path,
        UnsupportedError,
        "num_local_experts is 8: .* no mixture of experts",
        *SIZES,
        pair("llama.expert_count", 4, 8),
    )
    refuse(
        tmp_path,
        UnsupportedError,
        "value heads of 8 and key heads of 16",
        *SIZES,
        pair("llama.attention.value_length", 4, 8),
    )
    refuse(
        tmp_path,
        UnsupportedError,
        'RoPE scheme "longrope" is not supported',
        *SIZES,
        pair("llama.rope.scaling.type", 8, "longrope"),
    )
    refuse(
        tmp_path, UnsupportedError, "feed_forward_length differs between layers", *SIZES[:3], *SIZES[4:],
        pair("llama.feed_forward_length", 9, (4, [64, 32])),
    )  # fmt: skip
    refuse(
        tmp_path, UnsupportedError, "rope_freqs.weight: its factors are not those of llama3", *SIZES,
        tensors=(description("rope_freqs.weight", (8,), 0, 0),),
    )  # fmt: skip
    refuse(tmp_path, FormatError, "tensor .*token_embd.weight is missing", *SIZES)


@pytest.mark.parametrize("n_heads", [0, 1 << 20])
def test_heads_that_leave_no_size(n_heads: int, tmp_path: Path) -> None:
    sizes = [p for p in SIZES if b"head_count" not in p and b"key_length" not in p]
    heads = pair("llama.attention.head_count", 4, n_heads)
    refuse(tmp_path, FormatError, f"attention.head_count is {n_heads}, must be 1 to", *sizes, heads)


def test_a_yarn_factor_of_zero_below(tmp_path: Path) -> None:
    yarn = [
        pair("llama.rope.scaling.type", 8, "yarn"),
        pair("llama.rope.scaling.factor", 6, math.e),
        pair("llama.rope.scaling.attn_factor", 6, 2.0),
        pair("llama.rope.scaling.yarn_log_multiplier", 6, -20.0),
    ]
    refuse(tmp_path, FormatError, "rope.scaling.yarn_log_multiplier is -20", *SIZES, *yarn)


@pytest.mark.parametrize("name", ["bert", "qwen3moe", "\x1b[2J"])
def test_other_architectures_are_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file([pair("general.architecture", 8, name)]))
    with pytest.raises(UnsupportedError) as error:
        convert(path)
    assert "is not supported; supported: llama, qwen2" in str(error.value)
    assert "\x1b" not in str(error.value)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    model = seeded_model("llama")

    def extra(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_output.bias", np.zeros(64, np.float32))

    with pytest.raises(UnsupportedError, match=r"blk.0.attn_output.bias has no place in the format"):
        convert(write_gguf(model, tmp_path / "m.gguf", extra=extra), tmp_path / "m.mlb")


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    model = seeded_model("llama")
    path = write_gguf(model, tmp_path / "m.gguf", extra=None)
    data = path.read_bytes().replace(
        b"llama.feed_forward_length\x04\0\0\0\x60", b"llama.feed_forward_length\x04\0\0\0\x40"
    )
    path.write_bytes(data)
    with pytest.raises(ShapeError, match=r"blk.0.ffn_gate.weight has shape \[96, 64\], must be \[64, 64\]"):
        convert(path, tmp_path / "m.mlb")


def test_what_convert_takes(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"does not exist; convert takes a Hugging Face folder, a .gguf, or a .mllm"):
        convert(tmp_path / "none.gguf")
    (tmp_path / "x").write_text("text")
    with pytest.raises(FileError, match="is not a folder, a GGUF or an MLLM file"):
        convert(tmp_path / "x")
    path = write_gguf(seeded_model("llama"), tmp_path / "m.gguf")
    with pytest.raises(UsageError, match="takes no --config"):
        convert(path, config=tmp_path)


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    path = write_gguf(seeded_model("llama"), tmp_path / "m.gguf")
    before = path.read_bytes()
    with pytest.raises(FileError, match="it is the input itself"):
        convert(path, path, force=True)
    assert path.read_bytes() == before


# ---------------------------------------------------------------------------------------------------------------------
# The whole demo model


def demo_tokenizer(writer: Any) -> None:
    """tokenizer.json in the words of GGUF, as llama.cpp's converter writes them."""
    document = json.loads((DEMO / "tokenizer.json").read_text())
    special = {t["id"]: t["content"] for t in document["added_tokens"]}
    tokens = [t for t, _ in sorted(document["model"]["vocab"].items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"])


def demo_gguf(folder: Path, kind: Types = Types.BF16) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return write_gguf(model, folder / "demo.gguf", matrices_as(kind), demo_tokenizer)


def test_the_demo_model(tmp_path: Path) -> None:
    """Model, tokenizer and sidecar are those that the folder gives."""
    convert(DEMO, tmp_path / "a.mlb")
    convert(demo_gguf(tmp_path), tmp_path / "b.mlb")
    for suffix in ("mlb", "mlt"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    a, b = (read_sidecar(tmp_path / f"{n}.json") for n in "ab")
    assert (a.chat_template, a.stop_ids, a.special_tokens) == (b.chat_template, b.stop_ids, b.special_tokens)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    demo_gguf(tmp_path, Types.Q8_0)
    assert run(["convert", "demo.gguf", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["output"], document["tokenizer"]) == ("demo-q8.mlb", "mlt")
    assert document["copied_matrices"] == 29
    assert run(["validate", "demo-q8.mlb", "demo-q8.mlt"]) == 0
    assert load_tokenizer(tmp_path / "demo-q8.mlt").encode("<|im_start|>user").ids[0] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: None, "no tokenizer.ggml.tokens: the model is written without a tokenizer"),
        (lambda w: (demo_tokenizer(w), w.add_tokenizer_pre("default")), 'tokenizer.ggml.pre is "default", known are'),
        (lambda w: (demo_tokenizer(w), w.add_tokenizer_model("bert")), 'tokenizer.ggml.model "bert" is not supported'),
    ],
)
def test_models_without_a_usable_tokenizer(change: Any, message: str, tmp_path: Path) -> None:
    remarks = Remarks()
    path = write_gguf(seeded_model("llama"), tmp_path / "m.gguf", extra=change)
    convert(path, tmp_path / "m.mlb", progress=remarks)
    assert any(message in text for text in remarks.texts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "m.json", "m.mlb"]


_METADATA = (0, -1, 1, 2**31, 2**64 - 1, True, -0.5, 1e-45, 3e38, float("nan"), float("inf"), "", "x\x1b", [], ["a"])


@pytest.mark.parametrize("name", GGUF_CHECKPOINTS)
def test_metadata_of_every_kind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value of the model's settings in turn becomes something else, or is missing: planned or refused."""
    path = write_gguf(seeded_model(name), tmp_path / "m.gguf")
    model = open_gguf(path)
    monkeypatch.setattr(checkpoint, "open_gguf", lambda _path: model)
    values = dict(model.metadata)
    arrays = [np.array([], np.int32), np.array([0, -1], np.int32), np.array([np.nan], np.float32)]
    for key, entry in values.items():
        for other in (*_METADATA, *arrays, None):
            changed = {} if other is None else {key: replace(entry, value=other)}
            model.metadata = {k: v for k, v in values.items() if k != key} | changed
            try:
                checkpoint.open_checkpoint(path).plan(Options("q4"))
            except MlbError as error:
                assert "\n" not in str(error)
                assert "\x1b" not in str(error)
