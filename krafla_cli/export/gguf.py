"""Export to GGUF: Q4_0 and Q8_0 blocks bit for bit, metadata, tokenizer and chat template as llama.cpp reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import FileError, UnsupportedError, os_reason
from krafla_cli.export.gguf_model import architecture_for, metadata
from krafla_cli.export.opened import OpenedModel
from krafla_cli.export.tensors import ScaleRounding, Target, block_encoding, blocks, checkpoint_targets, dense
from krafla_cli.formats.atomic import Output, check_target, commit
from krafla_cli.formats.gguf_names import ROPE_FREQS, Architecture
from krafla_cli.formats.mlb import ROPE_LLAMA3, WTYPE_Q8_0, Header
from krafla_cli.formats.mlb_file import MlbFile
from krafla_cli.formats.sidecar import files_beside
from krafla_cli.formats.text import printable
from krafla_cli.parts import LAYOUTS, gguf_layout
from krafla_cli.progress import Progress
from krafla_cli.quant import ggml_blocks
from krafla_cli.rope import llama3_divisors

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from krafla_cli.tokenizer.ggml import GgmlTokenizer

_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def write_gguf(model: OpenedModel, path: Path, force: bool, progress: Progress) -> None:
    """Writes ``path``. Raises FileError, FormatError, UnsupportedError naming what GGUF cannot hold."""
    from gguf import GGUFWriter

    header = model.mlb.header
    architecture = architecture_for(header, printable(str(model.path)))
    targets = gguf_targets(model.mlb, architecture)
    check_target(path, force, inputs=(model.path, *files_beside(model.path)))
    rounding = ScaleRounding(str(model.path))
    output = Output(path)
    try:
        writer = GGUFWriter(output.temp, architecture.name)
        _add_metadata(writer, model, architecture)
        _add_tokenizer(writer, model, progress)
        _write(writer, model, targets, rounding, progress)
        writer.close()
        commit([output], force)
    except OSError as error:
        raise FileError(f"cannot write {printable(str(path))}: {os_reason(error)}") from error
    finally:
        output.discard()
    for remark in rounding.remarks():
        progress.info(remark)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def gguf_targets(mlb: MlbFile, architecture: Architecture) -> list[Target]:
    """The tensors of the file: names and row orders of the architecture; a padded FFN stays padded."""
    layout = gguf_layout(architecture, LAYOUTS[architecture.layout or architecture.model_type])
    return checkpoint_targets(mlb, layout, mlb.header.hidden_dim, prefix="")


def _write(
    writer: GGUFWriter, model: OpenedModel, targets: list[Target], rounding: ScaleRounding, progress: Progress
) -> None:
    """Header, metadata and descriptions, then one tensor at a time."""
    from gguf import GGMLQuantizationType

    freqs = _rope_freqs(model.mlb.header)
    if freqs is not None:
        writer.add_tensor_info(ROPE_FREQS, freqs.shape, freqs.dtype, freqs.nbytes)
    for target in targets:
        encoding, shape = block_encoding(target), target.shape
        if encoding is None:
            writer.add_tensor_info(target.name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
            continue
        row_bytes = shape[1] // 32 * (2 + ggml_blocks.QUANT_BYTES[encoding])
        kind = GGMLQuantizationType[encoding.upper()]
        writer.add_tensor_info(target.name, (shape[0], row_bytes), np.dtype(np.uint8), shape[0] * row_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if freqs is not None:
        writer.write_tensor_data(freqs)
    progress.start("exporting", sum(t.n_bytes for t in targets), "B")
    try:
        for target in targets:
            writer.write_tensor_data(_data(model.mlb, target, rounding))
            progress.advance(target.n_bytes)
    finally:
        progress.finish()


def _data(mlb: MlbFile, target: Target, rounding: ScaleRounding) -> npt.NDArray[Any]:
    encoding = block_encoding(target)
    if encoding is None:
        return np.ascontiguousarray(dense(mlb, target), "<f4")
    return ggml_blocks.join(rounding.rounded(target.name, blocks(mlb, target), encoding), encoding)


def _rope_freqs(header: Header) -> npt.NDArray[np.float32] | None:
    return llama3_divisors(header).astype(np.float32) if header.rope_type == ROPE_LLAMA3 else None


# ---------------------------------------------------------------------------------------------------------------------
# Metadata


def _add_metadata(writer: GGUFWriter, model: OpenedModel, architecture: Architecture) -> None:
    from gguf import LlamaFileType

    h = model.mlb.header
    writer.add_type("model")
    writer.add_name(model.name)
    writer.add_quantization_version(2)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0 if h.wtype == WTYPE_Q8_0 else LlamaFileType.MOSTLY_Q4_0)
    for key, value in metadata(h, architecture).items():
        _add(writer, key, value)
    sampling = model.settings.sampling if model.settings is not None else {}
    for key, name in _SAMPLING.items():
        if key in sampling:
            _add(writer, f"general.sampling.{name}", int(sampling[key]) if key == "top_k" else sampling[key])


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """``value`` in the type that readers of GGUF expect: uint32 and float32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, [v.item() if isinstance(v, np.generic) else v for v in value])


def _add_tokenizer(writer: GGUFWriter, model: OpenedModel, progress: Progress) -> None:
    """tokenizer.*: what llama.cpp reads, the tokenizer.json itself, and the chat template."""
    from krafla_cli.tokenizer.ggml import ggml_of

    if model.settings is not None and model.settings.chat_template is not None:
        writer.add_chat_template(model.settings.chat_template)
    if model.tokenizer is None:
        progress.warn(f"{printable(str(model.path))}: no tokenizer beside it: the file is written without one")
        writer.add_tokenizer_model("no_vocab")
        return
    try:
        ids = _special_ids(model, progress)
        exported = ggml_of(model.tokenizer, model.mlb.header.vocab, ids, model.tokenizer_text)
    except UnsupportedError as error:
        raise UnsupportedError(f"{printable(str(model.tokenizer_path))}: {error}") from error
    for remark in exported.remarks:
        progress.warn(remark)
    _add_vocabulary(writer, exported.ggml)


def _special_ids(model: OpenedModel, progress: Progress) -> Mapping[str, int]:
    """The special tokens, and stop ids besides EOS: GGUF has two places for them."""
    ids = dict(model.special_ids)
    if "eos" not in ids and model.stop_ids:
        ids["eos"] = model.stop_ids[0]
    others = [i for i in model.stop_ids if i != ids.get("eos")]
    ids |= dict(zip(("eot", "eom"), others, strict=False))
    if len(others) > 2:
        progress.warn(f"GGUF has places for three stop tokens; left out: {', '.join(map(str, others[2:]))}")
    return ids


def _add_vocabulary(writer: GGUFWriter, ggml: GgmlTokenizer) -> None:
    from gguf import Keys

    writer.add_tokenizer_model(ggml.model)
    if ggml.pre is not None:
        writer.add_tokenizer_pre(ggml.pre)
    writer.add_token_list(list(ggml.tokens))
    writer.add_token_types(list(ggml.types))
    if ggml.scores:
        writer.add_token_scores(list(ggml.scores))
    if ggml.merges:
        writer.add_token_merges(list(ggml.merges))
    for name, i in ggml.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", i)
    writer.add_add_bos_token(bool(ggml.add_bos))
    writer.add_add_eos_token(ggml.add_eos)
    if ggml.add_space_prefix is not None:
        writer.add_add_space_prefix(ggml.add_space_prefix)
    if ggml.hugging_face is not None:
        writer.add_string(Keys.Tokenizer.HF_JSON, ggml.hugging_face)
