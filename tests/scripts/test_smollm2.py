"""The script behind `make real`, on a small GGUF file of its kind."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import smollm2
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from krafla_cli.cli import invoke as run_cli
from tests.helpers import llama

CONFIG = {**llama.CONFIG, "tie_word_embeddings": True, "vocab_size": 40, "num_hidden_layers": 1}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMES = {f"model.layers.0.{hf}.weight": f"blk.0.{name}.weight" for name, hf in smollm2.IN_LAYER.items()} | {
    f"{hf}.weight": f"{name}.weight" for name, hf in smollm2.OUTSIDE.items()
}


def _interleaved(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Row i of a head's first half to 2i, of its second half to 2i + 1, as llama.cpp's converter writes them."""
    halves = rows.reshape(n_heads, 2, -1, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _write_gguf(path: Path, weights: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(40)
    writer.add_context_length(128)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(
        ["<|end|>", "<|im_start|>", "<|im_end|>", *map(chr, range(ord("A"), ord("A") + 34)), "Ġ", "1", "AB"]
    )
    writer.add_token_types([3, 3, 3] + [1] * 37)
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in weights.items():
        n_heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        writer.add_tensor(NAMES[name], _interleaved(values, n_heads) if n_heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def model(tmp_path: Path) -> smollm2.GgufModel:
    _write_gguf(tmp_path / "m.gguf", llama.tensors(CONFIG))
    return smollm2.GgufModel(tmp_path / "m.gguf")


def test_weights_come_back_in_hugging_face_order(model: smollm2.GgufModel) -> None:
    got = model.tensors()
    want = llama.tensors(CONFIG)
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


def test_the_folder_can_be_converted(model: smollm2.GgufModel, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    smollm2.write_folder(model, tmp_path / "hf")
    smollm2.write_texts(tmp_path / "hf")
    assert len(load_file(tmp_path / "hf/model.safetensors")) == len(NAMES)
    assert len((tmp_path / "hf/eval.txt").read_text()) == smollm2.EVAL_CHARS
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))
    assert tokenizer.encode("<|im_start|>AB 11").ids == [1, 39, 37, 38, 38]
    out = tmp_path / "m.mlb"
    assert run_cli(["convert", str(tmp_path / "hf"), "-o", str(out), "--quiet"]) == 0
    settings = json.loads((tmp_path / "m.json").read_text())
    assert (settings["chat_template"], settings["stop_ids"]) == (TEMPLATE, [2])
