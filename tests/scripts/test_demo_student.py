"""The committed demo student: its files, its forward pass, and how well it finds paraphrases."""

import json
from pathlib import Path

import numpy as np
import pytest
import train_demo_student
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

STUDENT = Path(__file__).parents[1] / "data" / "student"
Array = NDArray[np.float32]


@pytest.fixture(scope="module")
def weights() -> dict[str, Array]:
    return {name: tensor.astype(np.float32) for name, tensor in load_file(STUDENT / "model.safetensors").items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(STUDENT / "tokenizer.json"))


def test_folder_is_small_and_complete() -> None:
    assert {path.name for path in STUDENT.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert sum(path.stat().st_size for path in STUDENT.iterdir()) < 1_500_000


def test_tensors_are_those_of_the_config(weights: dict[str, Array]) -> None:
    c = json.loads((STUDENT / "config.json").read_text(encoding="utf-8"))
    d, f, out = c["d_model"], c["ffn_dim"], c["output_dim"]
    expected = {"embedding.weight": (c["vocab_size"], d), "projection.weight": (out, d), "projection.bias": (out,)}
    expected |= {"final_ln.weight": (d,), "final_ln.bias": (d,)}
    for n in range(c["n_layers"]):
        expected |= {f"layers.{n}.{ln}.{kind}": (d,) for ln in ("ln1", "ln2") for kind in ("weight", "bias")}
        expected |= {f"layers.{n}.attn.{name}.weight": (d, d) for name in ("q", "k", "v", "out")}
        expected |= {f"layers.{n}.attn.out.bias": (d,), f"layers.{n}.ffn.down.bias": (d,)}
        expected |= {f"layers.{n}.ffn.up.weight": (f, d), f"layers.{n}.ffn.up.bias": (f,)}
        expected |= {f"layers.{n}.ffn.down.weight": (d, f)}
    assert {name: tensor.shape for name, tensor in weights.items()} == expected
    assert all(np.isfinite(tensor).all() for tensor in weights.values())


def test_tokenizer_is_cased_and_knows_turkish_letters(tokenizer: Tokenizer) -> None:
    config = json.loads((STUDENT / "config.json").read_text(encoding="utf-8"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    encoding = tokenizer.encode("Işık İZMİR çğöşü QWX 2031")
    assert encoding.tokens[0] == "[CLS]"
    assert encoding.tokens[-1] == "[SEP]"
    assert "[UNK]" not in encoding.tokens
    assert tokenizer.encode("I").ids != tokenizer.encode("ı").ids != tokenizer.encode("i").ids


def layer_norm(x: Array) -> Array:
    normed: Array = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + np.float32(1e-5))
    return normed


def ternary_layer(x: Array, name: str, weights: dict[str, Array]) -> Array:
    """Section 6.3 of the LEMB specification, line by line."""
    weight = weights[f"{name}.weight"]
    magnitudes = np.sort(np.abs(weight), axis=None)
    scale = 1 / max(magnitudes[(magnitudes.size - 1) // 2], np.float32(1e-5))
    codes = np.clip(np.round(weight * scale), -1, 1)
    x_norm = layer_norm(x)
    x_scale = np.float32(128) / np.maximum(np.abs(x_norm).max(-1, keepdims=True), np.float32(1e-5))
    y = np.clip(np.round(x_norm * x_scale), -128, 127) @ codes.T + weights.get(f"{name}.bias", np.float32(0))
    out: Array = y / (scale * x_scale)
    return out


def test_bit_linear_is_the_specifications(weights: dict[str, Array]) -> None:
    torch = pytest.importorskip("torch")
    student = train_demo_student.load_student(STUDENT)
    x = np.random.default_rng(0).standard_normal((5, 64), dtype=np.float32)
    for name in ("layers.0.attn.q", "layers.1.attn.out", "layers.1.ffn.up"):
        with torch.no_grad():
            ours = student.get_submodule(name)(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(ours, ternary_layer(x, name, weights), rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing(tokenizer: Tokenizer) -> None:
    embed = train_demo_student.embedder(train_demo_student.load_student(STUDENT), tokenizer)
    alone = embed(["Kırmızı arabam nerede?"])[0]
    padded = embed(["Kırmızı arabam nerede?", "My mother bought the old wooden chair at the market yesterday."])[0]
    np.testing.assert_allclose(alone.numpy(), padded.numpy(), atol=1e-4)


def test_paraphrases_are_found_across_languages(tokenizer: Tokenizer) -> None:
    embed = train_demo_student.embedder(train_demo_student.load_student(STUDENT), tokenizer)
    recipe = train_demo_student.Recipe(held_out_families=25, held_out_seed=11)
    recalls = train_demo_student.held_out_recall(embed, recipe, [32, 64, 128])
    assert min(recalls["en-en"]) > 0.8
    assert min(recalls["en-tr"]) > 0.7
