"""Student checkpoints: safetensors and torch, both ways of naming tensors, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from krafla_cli.embed.student import read_student
from krafla_cli.errors import DataError, FileError, FormatError, ShapeError, UnsupportedError
from tests.embed.students import config_of, header_of, random_weights, write_student

TORCH_NAMES = {
    "ln1.": "norm1.",
    "ln2.": "norm2.",
    "attn.q.": "attn.W_q.",
    "attn.k.": "attn.W_k.",
    "attn.v.": "attn.W_v.",
    "attn.out.": "attn.W_out.",
    "ffn.up.": "ff.fc1.",
    "ffn.down.": "ff.fc2.",
    "final_ln.": "norm.",
}


def as_torch_names(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    renamed = {}
    for name, array in weights.items():
        for ours, theirs in TORCH_NAMES.items():
            name = name.replace(ours, theirs)
        renamed[name] = array
    return renamed


def tensors_of(weights: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(dtype) for name, array in weights.items()}


def torch_student(folder: Path, checkpoint: Any, config: bool = True) -> Path:
    folder.mkdir()
    torch.save(checkpoint, folder / "student.pt")
    if config:
        (folder / "config.json").write_text(json.dumps(config_of(header_of())))
    return folder


def same(student: Any, weights: dict[str, np.ndarray]) -> bool:
    return student.weights.keys() == weights.keys() and all(
        np.array_equal(student.weights[name], weights[name]) for name in weights
    )


WEIGHTS = random_weights(header_of(), seed=3)


@pytest.mark.parametrize("n_layers", [0, 2])
def test_safetensors(tmp_path: Path, n_layers: int) -> None:
    header = header_of(n_layers=n_layers)
    student = read_student(write_student(tmp_path / "s", header, seed=3))
    assert same(student, random_weights(header, seed=3))
    assert student.header.dims == (4, 8, 12)
    assert student.header.max_seq_len == 16


def test_pytorch_names(tmp_path: Path) -> None:
    student = read_student(torch_student(tmp_path / "s", tensors_of(as_torch_names(WEIGHTS))))
    assert same(student, WEIGHTS)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_torch_checkpoints_with_their_config(tmp_path: Path, key: str) -> None:
    checkpoint = {key: tensors_of(WEIGHTS), "config": config_of(header_of()), "step": 100, "loss": 0.5}
    folder = torch_student(tmp_path / "s", checkpoint, config=False)
    for source in (folder, folder / "student.pt"):
        student = read_student(source)
        assert same(student, WEIGHTS)
        assert student.folder == folder


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file as save_torch

    expected = {name: t.float().numpy() for name, t in tensors_of(WEIGHTS, dtype).items()}
    assert same(read_student(torch_student(tmp_path / "pt", tensors_of(WEIGHTS, dtype))), expected)
    folder = write_student(tmp_path / "st")
    save_torch(tensors_of(WEIGHTS, dtype), folder / "model.safetensors")
    assert same(read_student(folder), expected)


def test_parameters_that_want_gradients(tmp_path: Path) -> None:
    state = {name: torch.nn.Parameter(t) for name, t in tensors_of(WEIGHTS).items()}
    assert same(read_student(torch_student(tmp_path / "s", state)), WEIGHTS)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("pickled code was run",))


def test_pickled_code_is_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = torch_student(tmp_path / "s", {"embedding.weight": torch.zeros(1), "config": Evil()})
    with pytest.raises(UnsupportedError, match="could run code, and is not opened"):
        read_student(folder)
    (folder / "student.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UnsupportedError, match="could run code, and is not opened"):
        read_student(folder)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04", bytes(1000)])
def test_broken_torch_files(tmp_path: Path, content: bytes) -> None:
    folder = torch_student(tmp_path / "s", {})
    (folder / "student.pt").write_bytes(content)
    with pytest.raises((FormatError, UnsupportedError), match=r"no readable torch|no pickle of tensors"):
        read_student(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "the file is empty"), (b"hello world" * 9, "its content is damaged, or of another kind")],
)
def test_what_is_no_torch_file_is_said_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    folder = torch_student(tmp_path / "s", {})
    (folder / "student.pt").write_bytes(content)
    with pytest.raises(FormatError, match=rf"student\.pt: no readable torch checkpoint: {words}$"):
        read_student(folder)


def test_torch_files_with_something_else(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="must hold a state dict, holds a list"):
        read_student(torch_student(tmp_path / "a", [1, 2]))
    with pytest.raises(FormatError, match=r"embedding\.weight in the state dict is no tensor"):
        read_student(torch_student(tmp_path / "b", {"state_dict": {"embedding.weight": [1.0]}}))
    with pytest.raises(FileError, match="no config in the checkpoint"):
        read_student(torch_student(tmp_path / "c", tensors_of(WEIGHTS), config=False))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    folder = write_student(tmp_path / "s", **{"embedding.weight": np.zeros((24, 16), np.int8)})
    with pytest.raises(UnsupportedError, match=r"embedding\.weight is I8; give the weights in float"):
        read_student(folder)
    state = tensors_of(WEIGHTS) | {"norm.weight": torch.zeros(16, dtype=torch.int32)}
    with pytest.raises(UnsupportedError, match=r"norm\.weight is torch\.int32"):
        read_student(torch_student(tmp_path / "t", state))


# --- names and shapes


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    folder = write_student(tmp_path / "s", **{"pos_embedding.weight": np.zeros((16, 16), np.float32)})
    with pytest.raises(UnsupportedError, match=r"the format has no place for pos_embedding\.weight"):
        read_student(folder)


def test_more_layers_than_the_config_says(tmp_path: Path) -> None:
    folder = write_student(tmp_path / "s")
    config = config_of(header_of()) | {"n_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"no place for layers\.1\.attn\.k\.weight, .* and 10 more"):
        read_student(folder)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = write_student(tmp_path / "s")
    weights = {n: a for n, a in WEIGHTS.items() if not n.startswith("layers.1.ffn")}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(FormatError, match=r"lacks layers\.1\.ffn\.up\.weight, layers\.1\.ffn\.up\.bias, .* and 1 more"):
        read_student(folder)


def test_biases_that_no_layer_has_are_zero(tmp_path: Path) -> None:
    folder = write_student(tmp_path / "s")
    save_file({n: a for n, a in WEIGHTS.items() if not n.endswith("up.bias")}, folder / "model.safetensors")
    student = read_student(folder)
    assert not student.weights["layers.0.ffn.up.bias"].any()
    assert student.weights["layers.0.ffn.down.bias"].any()


def test_biases_of_q_k_v(tmp_path: Path) -> None:
    zero, one = np.zeros(16, np.float32), np.ones(16, np.float32)
    student = read_student(write_student(tmp_path / "zero", seed=3, **{"layers.0.attn.q.bias": zero}))
    assert same(student, WEIGHTS)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attn\.k\.bias is not zero, and the format has no bias"):
        read_student(write_student(tmp_path / "one", **{"layers.0.attn.k.bias": one}))


def test_a_tensor_under_both_names(tmp_path: Path) -> None:
    folder = write_student(tmp_path / "s", **{"norm.weight": np.ones(16, np.float32)})
    with pytest.raises(FormatError, match=r"two tensors are final_ln\.weight"):
        read_student(folder)


@pytest.mark.parametrize("rows", [23, 25])
def test_shapes_have_both_numbers(tmp_path: Path, rows: int) -> None:
    folder = write_student(tmp_path / "s", **{"embedding.weight": np.zeros((rows, 16), np.float32)})
    with pytest.raises(ShapeError, match=rf"embedding\.weight is {rows} x 16, the config implies 24 x 16"):
        read_student(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_must_be_finite(tmp_path: Path, value: float) -> None:
    bad = random_weights(header_of())["layers.1.ffn.up.weight"]
    bad[5, 3] = value
    folder = write_student(tmp_path / "s", **{"layers.1.ffn.up.weight": bad})
    with pytest.raises(DataError, match=r"layers\.1\.ffn\.up\.weight\[5, 3\] is (nan|inf), must be finite"):
        read_student(folder)


def test_float64_beyond_float32(tmp_path: Path) -> None:
    folder = write_student(tmp_path / "s", **{"projection.bias": np.full(12, 1e39)})
    with pytest.raises(DataError, match=r"projection\.bias\[0\] is inf, must be finite in float32"):
        read_student(folder)


# --- config.json


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_model": 18}, "d_model must be a multiple of 4, is 18"),
        ({"d_model": 0}, "d_model must be at least 1, is 0"),
        ({"d_model": 65536}, "d_model must be 0 to 65535, is 65536"),
        ({"d_model": "16"}, 'd_model must be 0 to 65535, is "16"'),
        ({"n_layers": True}, "n_layers must be 0 to 255, is true"),
        ({"n_layers": 1.5}, r"n_layers must be 0 to 255, is 1\.5"),
        ({"n_layers": -1}, "n_layers must be 0 to 255, is -1"),
        ({"n_heads": 3}, "n_heads must divide d_model, is 3"),
        ({"n_heads": 0}, "n_heads must be at least 1, is 0"),
        ({"vocab_size": -1}, "vocab_size must be 0 to 4294967295, is -1"),
        ({"output_dim": 0}, "output_dim must be at least 1, is 0"),
        ({"matryoshka_dims": [8, 4]}, "matryoshka_dims must ascend from at least 1 to at most output_dim 12, is 8, 4"),
        (
            {"matryoshka_dims": [4, 13]},
            "matryoshka_dims must ascend from at least 1 to at most output_dim 12, is 4, 13",
        ),
        ({"matryoshka_dims": [0, 4]}, "matryoshka_dims must ascend from at least 1"),
        ({"matryoshka_dims": [1, 2, 3, 4, 5, 6, 7, 8, 9]}, "9 widths, the format holds 8"),
        ({"matryoshka_dims": 4}, "matryoshka_dims must be a list of widths, is 4"),
        ({"matryoshka_dims": ["4", True]}, r'matryoshka_dims must be a list of widths, is \["4", true\]'),
    ],
)
def test_config_values(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = write_student(tmp_path / "s")
    (folder / "config.json").write_text(json.dumps(config_of(header_of()) | change))
    with pytest.raises(ShapeError, match=words):
        read_student(folder)


def test_a_config_null_is_said_as_json_says_it(tmp_path: Path) -> None:
    folder = write_student(tmp_path / "s")
    (folder / "config.json").write_text(json.dumps(config_of(header_of()) | {"n_heads": None}))
    with pytest.raises(ShapeError, match="n_heads must be 0 to 255, is null"):
        read_student(folder)


@pytest.mark.parametrize("key", ["vocab_size", "d_model", "n_layers", "n_heads", "ffn_dim", "output_dim"])
def test_config_keys(tmp_path: Path, key: str) -> None:
    folder = write_student(tmp_path / "s")
    config = config_of(header_of())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(FormatError, match=rf"{key} is missing \(model_type bert\)"):
        read_student(folder)


def test_a_static_config_needs_no_heads(tmp_path: Path) -> None:
    folder = write_student(tmp_path / "s", header_of(n_layers=0))
    config = {k: v for k, v in config_of(header_of(n_layers=0)).items() if k not in ("n_heads", "ffn_dim")}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_student(folder).header.n_heads == 0


# --- folders


def test_model2vec_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "m2v"
    folder.mkdir()
    save_file({"embeddings": np.zeros((4, 8), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "hidden_dim": 8}))
    with pytest.raises(UnsupportedError, match="LEMB applies LayerNorm to every token vector"):
        read_student(folder)
    (folder / "config.json").write_text(json.dumps(config_of(header_of(n_layers=0))))
    with pytest.raises(UnsupportedError, match="model2vec models cannot be packed"):
        read_student(folder)


def test_folders_without_weights_or_with_too_many(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file or directory"):
        read_student(tmp_path / "none")
    with pytest.raises(FileError, match="no weights"):
        read_student(tmp_path)
    folder = write_student(tmp_path / "s")
    (folder / "other.safetensors").write_bytes(b"")
    with pytest.raises(
        FileError, match=r"2 files of weights \(model\.safetensors, other\.safetensors\); give the file"
    ):
        read_student(folder)
    assert read_student(folder / "model.safetensors").header.d_model == 16
    with pytest.raises(FileError, match="a checkpoint is a folder, or a file named"):
        read_student(folder / "config.json")


def test_a_packed_model_in_the_folder_is_no_checkpoint(tmp_path: Path) -> None:
    folder = torch_student(tmp_path / "s", tensors_of(WEIGHTS))
    (folder / "packed.bin").write_bytes(b"LEMB\x01\x00")
    assert same(read_student(folder), WEIGHTS)
    with pytest.raises(FileError, match="is a packed LEMB model already"):
        read_student(folder / "packed.bin")


def test_a_bert_is_refused_by_its_config(tmp_path: Path) -> None:
    """Before its weights are read, whose buffers of integers are no fault."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 9, "hidden_size": 8}))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(UnsupportedError, match="model_type bert: LEMB holds models of its own architecture"):
        read_student(tmp_path)
