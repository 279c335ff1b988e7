"""Export to a Hugging Face folder: model.safetensors, config.json, the tokenizer and what generation needs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import FileError, os_reason
from krafla_cli.export.config import CheckpointConfig, checkpoint_config
from krafla_cli.export.opened import OpenedModel
from krafla_cli.export.tensors import Float32s, Target, checkpoint_targets, dense
from krafla_cli.formats.atomic import Output, check_target, commit
from krafla_cli.formats.safetensors_writer import NewTensor, SafetensorsWriter
from krafla_cli.formats.sidecar import files_beside
from krafla_cli.formats.text import printable
from krafla_cli.progress import Progress

WEIGHTS = "model.safetensors"
_DTYPES = {"f32": ("F32", "float32"), "bf16": ("BF16", "bfloat16")}


def write_folder(model: OpenedModel, folder: Path, dtype: str, force: bool, progress: Progress) -> tuple[Path, ...]:
    """Writes the checkpoint to ``folder``, which is made if it is missing; returns its files.

    All files appear complete or not at all, the weights last. ``dtype``: "f32" (exact) or "bf16". Raises FileError,
    FormatError, UnsupportedError.
    """
    config = checkpoint_config(model)
    documents = _documents(model, config, dtype)
    targets = checkpoint_targets(model.mlb, config.layout, config.hidden_dim)
    with _made(folder):
        names = [*documents, WEIGHTS]
        for name in names:
            check_target(folder / name, force, inputs=(model.path, *files_beside(model.path)))
        with contextlib.ExitStack() as stack:
            outputs = []
            for name in names:
                outputs.append(Output(folder / name))
                stack.callback(outputs[-1].discard)
            for output, data in zip(outputs, documents.values(), strict=False):
                _write(output, data)
            _write_weights(outputs[-1], model, targets, dtype, progress)
            commit(outputs, force)
    return tuple(folder / name for name in names)


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """``folder`` exists inside the block; one that was made for it is removed again when the block fails."""
    is_new = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {printable(str(folder))}: {os_reason(error)}") from error
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _write(output: Output, data: bytes) -> None:
    try:
        output.file.write(data)
    except OSError as error:
        raise FileError(f"cannot write {printable(str(output.target))}: {os_reason(error)}") from error


def _write_weights(output: Output, model: OpenedModel, targets: list[Target], dtype: str, progress: Progress) -> None:
    progress.start("exporting", sum(t.n_bytes for t in targets), "B")
    try:
        _stream(output.file, model, targets, dtype, progress)
    except OSError as error:
        raise FileError(f"cannot write {printable(str(output.target))}: {os_reason(error)}") from error
    finally:
        progress.finish()


def _stream(file: BinaryIO, model: OpenedModel, targets: list[Target], dtype: str, progress: Progress) -> None:
    name_of_dtype = _DTYPES[dtype][0]
    writer = SafetensorsWriter(file, [NewTensor(t.name, name_of_dtype, t.shape) for t in targets])
    for target in targets:
        values = dense(model.mlb, target)
        writer.write(target.name, np.ascontiguousarray(values, "<f4") if dtype == "f32" else bfloat16_bits(values))
        progress.advance(target.n_bytes)
    writer.finish()


def bfloat16_bits(values: Float32s) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16, ties to even, as bits; for finite values."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")


def _documents(model: OpenedModel, config: CheckpointConfig, dtype: str) -> dict[str, bytes]:
    """Every file but the weights."""
    settings = model.settings
    found: dict[str, bytes] = {"config.json": _json(config.raw | {"dtype": _DTYPES[dtype][1]})}
    tokenizer = model.tokenizer_json
    if tokenizer is not None:
        found["tokenizer.json"] = tokenizer
        found["tokenizer_config.json"] = _json(_tokenizer_config(model))
    if model.stop_ids or (settings is not None and settings.sampling):
        found["generation_config.json"] = _json(_generation_config(model))
    return found


def _tokenizer_config(model: OpenedModel) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.mlb.header.max_seq,
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    if model.tokenizer is not None:
        config |= {names[kind]: model.tokenizer.id_to_token(i) for kind, i in model.special_ids.items()}
    if model.settings is not None and model.settings.chat_template is not None:
        config["chat_template"] = model.settings.chat_template
    return config


def _generation_config(model: OpenedModel) -> dict[str, Any]:
    sampling = dict(model.settings.sampling) if model.settings is not None else {}
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    config: dict[str, Any] = {"eos_token_id": list(model.stop_ids)} if model.stop_ids else {}
    if sampling.get("temperature") == 0.0:
        return config | {"do_sample": False}
    return config | ({"do_sample": True} | sampling if sampling else {})


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
