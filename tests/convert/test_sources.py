"""Which files of a folder are read, paths that would leave it, and tensors that are missing, wrong or unknown."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from krafla_cli.convert.dense import open_dense
from krafla_cli.convert.pipeline import convert
from krafla_cli.convert.sources import open_folder
from krafla_cli.errors import DataError, FileError, FormatError, MlbError, ShapeError, UnsupportedError
from tests.helpers.llama import CONFIG, tensors, write


def sharded(folder: Path, n_shards: int = 2) -> Path:
    """The small checkpoint in shards with an index."""
    folder.mkdir()
    weights = tensors()
    names = [f"model-{i}.safetensors" for i in range(n_shards)]
    weight_map = {t: names[k % n_shards] for k, t in enumerate(weights)}
    for name in names:
        safetensors.numpy.save_file({t: w for t, w in weights.items() if weight_map[t] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def same_bytes(one: Path, other: Path, tmp_path: Path) -> bool:
    convert(one, tmp_path / "one.mlb")
    convert(other, tmp_path / "other.mlb")
    return (tmp_path / "one.mlb").read_bytes() == (tmp_path / "other.mlb").read_bytes()


def refused(folder: Path, error: type[MlbError]) -> str:
    with pytest.raises(error) as raised:
        convert(folder, folder / "out.mlb")
    assert [p for p in folder.iterdir() if "out" in p.name or "tmp" in p.name] == []
    return str(raised.value).replace(str(folder), "DIR")


def test_single_file_and_shards_give_the_same_model(tmp_path: Path) -> None:
    assert same_bytes(write(tmp_path / "single"), sharded(tmp_path / "shards"), tmp_path)


def test_the_index_alone_decides(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "shards")
    safetensors.numpy.save_file({"tok_embeddings.weight": np.ones(3, np.float32)}, folder / "consolidated.safetensors")
    (folder / "model-9.safetensors").write_bytes(b"not a shard")
    assert same_bytes(write(tmp_path / "single"), folder, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_bin_gives_the_same_model(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {k: torch.from_numpy(v).to(dtype) for k, v in tensors().items()}
    folder = write(tmp_path / "st", weights={k: v.float().numpy() for k, v in weights.items()})
    single = tmp_path / "bin"
    single.mkdir()
    torch.save(weights, single / "pytorch_model.bin")
    shards = tmp_path / "shards"
    shards.mkdir()
    weight_map = {t: f"pytorch_model-{k % 2}.bin" for k, t in enumerate(weights)}
    for name in set(weight_map.values()):
        torch.save({t: w for t, w in weights.items() if weight_map[t] == name}, shards / name)
    (shards / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for other in (single, shards):
        (other / "config.json").write_text(json.dumps(CONFIG))
        convert(other, tmp_path / f"{other.name}.mlb")
    convert(folder, tmp_path / "st.mlb")
    assert (tmp_path / "bin.mlb").read_bytes() == (tmp_path / "st.mlb").read_bytes()
    assert (tmp_path / "shards.mlb").read_bytes() == (tmp_path / "st.mlb").read_bytes()


class Hostile:
    """Unpickled by a careless reader, it would run a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch hacked",)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"model.embed_tokens.weight": Hostile()}, folder / "pytorch_model.bin")
    text = refused(folder, UnsupportedError)
    assert text == (
        "DIR/pytorch_model.bin: no pickle of tensors alone: it is damaged, or could run code, and is not opened; "
        "use the checkpoint's safetensors"
    )
    assert not (tmp_path / "hacked").exists()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    assert "could run code" in refused(folder, UnsupportedError)


@pytest.mark.parametrize("data", [b"", b"junk", b"PK\x03\x04" + bytes(50)])
def test_broken_torch_bin(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises((FormatError, UnsupportedError)) as raised:
        open_folder(tmp_path)
    assert "pytorch_model.bin: " in str(raised.value)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_index_entries_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    folder = sharded(tmp_path / "shards")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), name)}))
    assert refused(folder, FormatError) == f'DIR: "{name}" is no plain file name'


def test_links_that_leave_the_folder(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside")
    folder = tmp_path / "link"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").symlink_to(outside / "model.safetensors")
    assert refused(folder, FormatError) == "DIR/model.safetensors is a link that leads out of the checkpoint folder"


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (blobs / name).write_bytes((write(tmp_path / "plain") / name).read_bytes())
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert same_bytes(tmp_path / "plain", snapshot, tmp_path)


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "shards")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"more.weight": "model-0.safetensors"}}))
    assert refused(folder, FormatError) == "DIR/model-0.safetensors: the index names more.weight, the file lacks it"
    (folder / "model-1.safetensors").unlink()
    assert refused(folder, FileError) == "cannot open DIR/model-1.safetensors: No such file or directory"
    index.write_text("{}")
    assert refused(folder, FormatError) == "DIR/model.safetensors.index.json: weight_map is missing or empty"


def test_a_short_shard_is_not_read_as_zeros(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "shards")
    shard = folder / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "it was cut off or extended" in refused(folder, FormatError)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert refused(tmp_path, FileError) == "DIR: no model.safetensors, pytorch_model.bin or index of either"
    safetensors.numpy.save_file(tensors(), tmp_path / "weights.safetensors")
    assert refused(tmp_path, FileError).endswith("; it holds weights.safetensors, which no index names")


# --- tensors


def changed(folder: Path, remove: str = "", **add: np.ndarray) -> Path:
    weights = {k: v for k, v in tensors().items() if k != remove}
    return write(folder, weights=weights | {k.replace("__", "."): v for k, v in add.items()})


def test_untied_without_a_head(tmp_path: Path) -> None:
    text = refused(changed(tmp_path / "m", remove="lm_head.weight"), FormatError)
    assert (
        text == "DIR: tensor lm_head.weight is missing, and tie_word_embeddings is false: the classifier has no weights"
    )


TIED = CONFIG | {"tie_word_embeddings": True}


def with_head(folder: Path, head: np.ndarray, embedding: np.ndarray | None = None) -> Path:
    weights = tensors(TIED)
    if embedding is not None:
        weights["model.embed_tokens.weight"] = embedding
    return write(folder, TIED, weights | {"lm_head.weight": head})


def test_a_tied_head_that_is_the_embedding_is_left_out(tmp_path: Path) -> None:
    embedding = tensors(TIED)["model.embed_tokens.weight"]
    assert same_bytes(write(tmp_path / "plain", TIED), with_head(tmp_path / "m", embedding), tmp_path)
    half = embedding.astype(np.float16)
    convert(with_head(tmp_path / "f16", half), tmp_path / "f16.mlb")  # rounded, so not the same to the bit
    convert(with_head(tmp_path / "both", half, half), tmp_path / "both.mlb")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_tied_head_of_its_own_is_not_dropped(tmp_path: Path, dtype: type) -> None:
    """transformers 5 uses such a head, older releases the embedding."""
    head = tensors(TIED)["model.embed_tokens.weight"].astype(dtype)
    head[7, 5] *= 1.5
    folder = with_head(tmp_path / "m", head)
    assert refused(folder, DataError) == (
        "DIR: tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight: row 7 differs; with "
        "tie_word_embeddings false in config.json it is used"
    )
    with pytest.raises(DataError, match="row 7 differs"):
        open_dense(folder)
    assert "row 39 differs" in refused(with_head(tmp_path / "short", head[:39]), DataError)


def test_missing_tensor(tmp_path: Path) -> None:
    text = refused(changed(tmp_path / "m", remove="model.layers.1.mlp.up_proj.weight"), FormatError)
    assert text == "DIR: tensor model.layers.1.mlp.up_proj.weight is missing"


def test_unknown_tensors_are_not_dropped(tmp_path: Path) -> None:
    bias = {"model__layers__0__self_attn__o_proj__bias": np.zeros(64, np.float32)}
    text = refused(changed(tmp_path / "m", **bias), UnsupportedError)
    assert text == (
        "DIR: model.layers.0.self_attn.o_proj.bias has no place in the format for family llama; leaving it out would "
        "change the model"
    )


def test_known_buffers_are_no_weights(tmp_path: Path) -> None:
    buffer = {"model__layers__0__self_attn__rotary_emb__inv_freq": np.zeros(8, np.float32)}
    assert same_bytes(write(tmp_path / "plain"), changed(tmp_path / "m", **buffer), tmp_path)


def test_wrong_shape(tmp_path: Path) -> None:
    wrong = {"model__layers__0__self_attn__k_proj__weight": np.zeros((64, 64), np.float32)}
    text = refused(changed(tmp_path / "m", **wrong), ShapeError)
    assert text == "DIR: model.layers.0.self_attn.k_proj.weight has shape [64, 64], must be [32, 64]"


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float64])
def test_quantized_tensors_are_refused(tmp_path: Path, dtype: type) -> None:
    wrong = {"model__layers__0__self_attn__k_proj__weight": np.zeros((32, 64), dtype)}
    text = refused(changed(tmp_path / "m", **wrong), UnsupportedError)
    assert "model.layers.0.self_attn.k_proj.weight is " in text
    assert "F32, F16 or BF16" in text
    assert ("quantized already" in text) == (dtype is not np.float64)


@pytest.mark.parametrize(("rows", "stated"), [(40, 37), (36, 37)])
def test_embedding_rows_and_the_config(tmp_path: Path, rows: int, stated: int) -> None:
    weights = tensors(CONFIG | {"vocab_size": rows})
    folder = write(tmp_path / "m", CONFIG | {"vocab_size": stated}, weights)
    text = refused(folder, ShapeError)
    assert text == f"DIR/config.json: vocab_size is {stated}, model.embed_tokens.weight has {rows} rows"


@pytest.mark.parametrize("stated", [-1, None])
def test_a_config_without_a_vocabulary_size(tmp_path: Path, stated: int | None) -> None:
    folder = write(tmp_path / "m", CONFIG | {"vocab_size": stated}, tensors())
    assert convert(folder, tmp_path / "m.mlb").plan.header.vocab == 40


@pytest.mark.parametrize(
    ("name", "place", "value", "text"),
    [
        (
            "model.layers.1.mlp.down_proj.weight",
            (3, 70),
            np.nan,
            "model.layers.1.mlp.down_proj.weight: row 3, column 70: ",
        ),
        ("model.layers.0.self_attn.q_proj.weight", (9, 5), np.inf, "q_proj.weight: row 9, column 5: "),
        ("model.norm.weight", (7,), np.inf, "DIR: model.norm.weight: row 7: the weight is inf"),
    ],
)
def test_weights_that_are_no_numbers(
    tmp_path: Path, name: str, place: tuple[int, ...], value: float, text: str
) -> None:
    weights = tensors()
    weights[name][place] = value
    assert text in refused(write(tmp_path / "m", weights=weights), DataError)


def test_a_weight_beyond_f16_scales(tmp_path: Path) -> None:
    weights = tensors()
    weights["lm_head.weight"][2, 33] = 1e6
    folder = write(tmp_path / "m", weights=weights)
    assert "lm_head.weight: row 2, column 33" in refused(folder, DataError)
