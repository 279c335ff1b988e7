"""Student checkpoints: config.json and weights (safetensors, or a torch checkpoint without pickled code).

Tensor names are this format's ("layers.0.attn.q.weight") or a PyTorch student's ("layers.0.attn.W_q.weight").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import DataError, FileError, FormatError, ShapeError, UnsupportedError
from krafla_cli.formats.faults import Fault
from krafla_cli.formats.json_file import read_json_object, shown_json
from krafla_cli.formats.lemb_layout import LAYOUT, MAGIC, MAX_MATRYOSHKA, Header, tensors
from krafla_cli.formats.safetensors import SafetensorsFile
from krafla_cli.formats.text import printable
from krafla_cli.torch_file import load_torch

if TYPE_CHECKING:
    from torch import Tensor

Float32 = npt.NDArray[np.float32]

CONFIG_JSON = "config.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_STATE_KEYS = ("state_dict", "model_state_dict", "model")
_STATIC_KEYS = ("vocab_size", "d_model", "n_layers", "output_dim")
_LAYER_KEYS = ("n_heads", "ffn_dim")

_PYTORCH_NAMES = (
    (re.compile(r"^(layers\.\d+)\.norm([12])\."), r"\1.ln\2."),
    (re.compile(r"^(layers\.\d+)\.attn\.W_(q|k|v|out)\."), r"\1.attn.\2."),
    (re.compile(r"^(layers\.\d+)\.ff\.fc1\."), r"\1.ffn.up."),
    (re.compile(r"^(layers\.\d+)\.ff\.fc2\."), r"\1.ffn.down."),
    (re.compile(r"^norm\."), "final_ln."),
)
_NO_BIAS = re.compile(r"^layers\.\d+\.attn\.[qkv]\.bias$")


@dataclass(frozen=True)
class Student:
    """A checkpoint: ``header`` with the sizes of its config, ``weights`` float32 by this format's tensor names.

    ``max_seq_len`` of the header is 0 where the config has none. ``folder`` is where the vocabulary lies; ``files``
    are the files read.
    """

    header: Header
    weights: Mapping[str, Float32]
    folder: Path
    files: tuple[Path, ...]


def read_student(source: Path) -> Student:
    """The student in a folder, or in a torch checkpoint that holds ``config`` or lies beside a config.json.

    Raises FileError, FormatError, ShapeError (a tensor's shape is not what the config implies), UnsupportedError
    (model2vec, tensors that the format has no place for), DataError (values that are not finite).
    """
    folder = source if source.is_dir() else source.parent
    weights_file = _weights_file(source)
    _refuse_other_models(folder)
    if weights_file.suffix in TORCH_SUFFIXES:
        raw, config = _read_torch(weights_file)
    else:
        raw, config = _read_safetensors(weights_file), None
    config_file = folder / CONFIG_JSON
    files = [weights_file]
    if config_file.exists():
        config = read_json_object(config_file)
        files.append(config_file)
    if config is None:
        raise FileError(f"{printable(str(source))}: no {CONFIG_JSON}, and no config in the checkpoint")
    name = printable(str(config_file if config_file.exists() else weights_file))
    header = header_of_config(config, name)
    weights = _canonical(raw, header, printable(str(weights_file)))
    return Student(header, weights, folder, tuple(files))


# ---------------------------------------------------------------------------------------------------------------------
# config.json


def header_of_config(config: Mapping[str, Any], name: str) -> Header:
    """A header with the sizes of ``config`` (fp32, unnamed). Raises FormatError or ShapeError that names the key."""
    keys = _STATIC_KEYS if config.get("n_layers") == 0 else (*_STATIC_KEYS, *_LAYER_KEYS)
    for key in keys:
        if key not in config:
            kind = config.get("model_type")
            of = f" (model_type {printable(str(kind))})" if kind else ""
            raise FormatError(f"{name}: {key} is missing{of}; a student's config has {', '.join(keys)}, max_seq_len")
    values: dict[str, Any] = {key: _size(config, key, name) for key in (*_STATIC_KEYS, *_LAYER_KEYS, "max_seq_len")}
    header = Header(**values)
    # max_seq_len may still come from an option.
    fault = next((f for f in LAYOUT.faults(header.values) if f.where != "max_seq_len"), None)
    if fault is not None:
        raise _config_error(fault, name)
    return with_matryoshka(header, config.get("matryoshka_dims") or (), f"{name}: matryoshka_dims")


def _config_error(fault: Fault, name: str) -> FormatError:
    error = ShapeError if fault.status == ShapeError.status else FormatError
    return error(f"{name}: {fault.where} {fault.message}")


def _size(config: Mapping[str, Any], key: str, name: str) -> int:
    """A size that its field in the header can hold; 0 where it is absent."""
    value = config.get(key, 0)
    limit = (1 << 8 * LAYOUT[key].n_bytes) - 1
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise ShapeError(f"{name}: {key} must be 0 to {limit}, is {shown_json(value)}")
    return value


def with_matryoshka(header: Header, dims: Any, name: str) -> Header:
    """``header`` with these Matryoshka widths. Raises ShapeError: no list of at most 8 sizes, unsorted, too large."""
    if not isinstance(dims, (list, tuple)) or not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        raise ShapeError(f"{name} must be a list of widths, is {shown_json(dims)}")
    if len(dims) > MAX_MATRYOSHKA:
        raise ShapeError(f"{name}: {len(dims)} widths, the format holds {MAX_MATRYOSHKA}")
    ascending = all(a < b for a, b in zip((0, *dims), dims, strict=False))
    if not ascending or any(d > header.output_dim for d in dims):
        shown = ", ".join(map(str, dims))
        raise ShapeError(f"{name} must ascend from at least 1 to at most output_dim {header.output_dim}, is {shown}")
    padded = (*dims, *[0] * (MAX_MATRYOSHKA - len(dims)))
    return Header(**{**header.values, "n_matryoshka": len(dims), "matryoshka_dims": padded})


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def _weights_file(source: Path) -> Path:
    """``source`` itself, or the one file of weights in the folder ``source``."""
    name = printable(str(source))
    if not source.exists():
        raise FileError(f"cannot open {name}: No such file or directory")
    if not source.is_dir():
        if source.suffix not in (*TORCH_SUFFIXES, ".safetensors"):
            raise FileError(f"{name}: a checkpoint is a folder, or a file named *.safetensors, *.pt, *.pth or *.bin")
        if _is_packed(source):
            raise FileError(f"{name}: is a packed LEMB model already; give the student that it was made of")
        return source
    for suffixes in ((".safetensors",), TORCH_SUFFIXES):
        found = sorted(p for p in source.iterdir() if p.suffix in suffixes and p.is_file() and not _is_packed(p))
        if len(found) > 1:
            shown = ", ".join(printable(p.name, 40) for p in found[:4])
            raise FileError(f"{name}: {len(found)} files of weights ({shown}); give the file instead of the folder")
        if found:
            return found[0]
    raise FileError(f"{name}: no weights (*.safetensors, *.pt, *.pth or *.bin)")


def _is_packed(path: Path) -> bool:
    """A model packed into the student's own folder is named *.bin as a torch checkpoint may be."""
    with path.open("rb") as f:
        return f.read(len(MAGIC)) == MAGIC


def _refuse_other_models(folder: Path) -> None:
    """Refuses a checkpoint of another architecture by its config, before its weights are read."""
    path = folder / CONFIG_JSON
    config = read_json_object(path) if path.exists() else {}
    kind = config.get("model_type")
    if kind == "model2vec":
        raise _model2vec(printable(str(folder)))
    if kind is not None and not any(key in config for key in _STATIC_KEYS if key != "vocab_size"):
        raise UnsupportedError(
            f"{printable(str(path))}: model_type {printable(str(kind))}: LEMB holds models of its own architecture, "
            "trained for it (no positions, ternary products); a checkpoint of another one cannot be packed"
        )


def _model2vec(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: model2vec models cannot be packed: LEMB applies LayerNorm to every token vector (section 6.2), which "
        "would change their embeddings; train a static student with that LayerNorm"
    )


def _read_safetensors(path: Path) -> dict[str, Float32]:
    file = SafetensorsFile(path)
    return {name: _widened(file.array(name), file.tensors[name].dtype, path, name) for name in file.tensors}


def _widened(array: npt.NDArray[Any], dtype: str, path: Path, name: str) -> Float32:
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype not in ("F16", "F32", "F64"):
        raise _no_floats(path, name, dtype)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, which is refused by name
        return array.astype(np.float32)


def _no_floats(path: Path, name: str, dtype: str) -> UnsupportedError:
    where = f"{printable(str(path))}: {printable(name)}"
    return UnsupportedError(f"{where} is {dtype}; give the weights in float, before any quantization")


def _read_torch(path: Path) -> tuple[dict[str, Float32], dict[str, Any] | None]:
    """State dict and config of a torch checkpoint, read without running pickled code."""
    import torch

    loaded = load_torch(path)
    config = loaded.get("config")
    state = next((loaded[key] for key in _STATE_KEYS if isinstance(loaded.get(key), Mapping)), loaded)
    weights = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            weights[str(name)] = _torch_array(value, path, str(name))
        elif state is not loaded:
            raise FormatError(f"{printable(str(path))}: {printable(str(name))} in the state dict is no tensor")
    return weights, dict(config) if isinstance(config, Mapping) else None


def _torch_array(tensor: Tensor, path: Path, name: str) -> Float32:
    import torch

    dtypes = {torch.float16: "F16", torch.bfloat16: "F32", torch.float32: "F32", torch.float64: "F64"}
    if tensor.dtype not in dtypes or tensor.layout != torch.strided:
        raise _no_floats(path, name, f"{tensor.dtype} ({tensor.layout})")
    plain = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
    return _widened(plain.numpy(), dtypes[tensor.dtype], path, name)


# ---------------------------------------------------------------------------------------------------------------------
# Names, shapes, values


def _canonical(raw: Mapping[str, Float32], header: Header, where: str) -> dict[str, Float32]:
    """The tensors that the header implies, by this format's names, each with its shape and finite values."""
    if "embedding.weight" not in raw and "embeddings" in raw:
        raise _model2vec(where)
    weights = _renamed(raw, where)
    expected = {s.name: s.shape for s in tensors(header) if not s.name.endswith((".scale", ".scales"))}
    _drop_zero_biases(weights, where)
    unknown = sorted(weights.keys() - expected.keys())
    if unknown:
        raise UnsupportedError(f"{where}: the format has no place for {_listed(unknown)}")
    _add_absent_biases(weights, expected)
    missing = [name for name in expected if name not in weights]
    if missing:
        raise FormatError(f"{where}: lacks {_listed(missing)}, which the config implies")
    for name, shape in expected.items():
        _check(weights[name], name, shape, where)
    return {name: weights[name] for name in expected}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(printable(n, 60) for n in names[:3]) + more


def _renamed(raw: Mapping[str, Float32], where: str) -> dict[str, Float32]:
    weights: dict[str, Float32] = {}
    for name, array in raw.items():
        new = name
        for pattern, replacement in _PYTORCH_NAMES:
            new = pattern.sub(replacement, new)
        if new in weights:
            raise FormatError(f"{where}: two tensors are {printable(new, 60)}, one of them named {printable(name, 60)}")
        weights[new] = array
    return weights


def _drop_zero_biases(weights: dict[str, Float32], where: str) -> None:
    """The format has no bias for q, k and v; zeros are no loss, other values cannot be represented."""
    for name in [n for n in weights if _NO_BIAS.match(n)]:
        if weights[name].any():
            raise UnsupportedError(f"{where}: {name} is not zero, and the format has no bias for q, k and v")
        del weights[name]


def _add_absent_biases(weights: dict[str, Float32], expected: Mapping[str, tuple[int, ...]]) -> None:
    """A kind of bias that the student has in no layer is zero; one that is there in some layers only is missing."""
    present = {_kind(name) for name in weights}
    for name, shape in expected.items():
        if name.endswith(".bias") and _kind(name) not in present:
            weights[name] = np.zeros(shape, np.float32)


def _kind(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "", name)


def _check(array: Float32, name: str, shape: tuple[int, ...], where: str) -> None:
    if array.shape != shape:
        raise ShapeError(f"{where}: {name} is {_shown(array.shape)}, the config implies {_shown(shape)}")
    finite = np.isfinite(array)
    if not finite.all():
        place = np.unravel_index(int(np.argmin(finite)), shape)
        at = ", ".join(str(int(i)) for i in place)
        raise DataError(f"{where}: {name}[{at}] is {array[place]}, must be finite in float32")


def _shown(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a single value"
