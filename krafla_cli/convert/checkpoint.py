"""What a conversion starts from: a Hugging Face folder, a GGUF file, or an MLLM file with the folder of its config."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from krafla_cli.convert.companions import Companions, read_companions
from krafla_cli.convert.config import ModelConfig, read_config, refuse_quantized
from krafla_cli.convert.families import family_of
from krafla_cli.convert.families.base import Family
from krafla_cli.convert.gguf_config import architecture_of, gguf_config
from krafla_cli.convert.plan import Options, Plan, make_plan
from krafla_cli.convert.sources import Source, TypedSource, open_folder
from krafla_cli.convert.tokenizer_files import TokenizerFile, folder_tokenizer, gguf_tokenizer
from krafla_cli.errors import FileError, FormatError, UsageError
from krafla_cli.formats.detect import detect
from krafla_cli.formats.gguf import GgufFile, open_gguf
from krafla_cli.formats.gguf_names import ROPE_FREQS, Architecture
from krafla_cli.formats.mllm import open_mllm
from krafla_cli.formats.text import printable
from krafla_cli.parts import gguf_layout
from krafla_cli.progress import Progress

_TAKES = "convert takes a Hugging Face folder, a .gguf, or a .mllm with --config"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been opened; no weight has been read.

    ``name``: what outputs are named after. ``inputs``: files that are never overwritten. ``config`` has the family's
    defaults. ``tokenizer``: vocabulary size of the model -> the file to write, None with a warning.
    """

    name: str
    inputs: tuple[Path, ...]
    config: ModelConfig
    family: Family
    source: Source
    companions: Companions
    tokenizer: Callable[[int, Progress], TokenizerFile | None]

    def plan(self, options: Options) -> Plan:
        """The conversion, decided. Raises FormatError, ShapeError or UnsupportedError, naming the key or tensor."""
        return make_plan(self.family, self.config, self.family.header(self.config), self.source, options)


def open_checkpoint(src: Path, config_folder: Path | None = None) -> Checkpoint:
    """Opens ``src``; ``config_folder`` has the config and tokenizer of an MLLM file.

    Raises FileError, FormatError, UnsupportedError; UsageError where ``config_folder`` is missing or of no use.
    """
    if not src.exists():
        raise FileError(f"{printable(str(src))} does not exist; {_TAKES}")
    if src.is_dir():
        kind = "folder"
    else:
        kind = _kind_of_file(src)
    if (config_folder is not None) != (kind == "mllm"):
        what = (
            "takes no --config: it has its own"
            if kind != "mllm"
            else "needs --config DIR, the folder of its config.json"
        )
        raise UsageError(f"{printable(str(src))} {what}")
    if kind == "folder":
        return _open_folder(src)
    return _open_gguf(src) if config_folder is None else _open_mllm(src, config_folder)


def _kind_of_file(path: Path) -> str:
    try:
        kind = detect(path).kind
    except FormatError:
        kind = ""
    if kind == "mlb":
        raise FileError(f"{printable(str(path))} is a .mlb model already; mlb export writes it in other formats")
    if kind not in ("gguf", "mllm"):
        raise FileError(f"{printable(str(path))} is not a folder, a GGUF or an MLLM file; {_TAKES}")
    return kind


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").exists():
        raise FileError(f"{printable(str(folder))}: no config.json; {_TAKES}")
    return folder


def _open_folder(folder: Path) -> Checkpoint:
    config = read_config(_checked_folder(folder))
    refuse_quantized(config)
    return _of_folder(folder.resolve().name, tuple(folder.iterdir()), folder, config, lambda: open_folder(folder))


def _open_mllm(path: Path, folder: Path) -> Checkpoint:
    if not folder.is_dir():
        raise FileError(f"--config {printable(str(folder))}: no such folder")
    config = read_config(_checked_folder(folder))
    return _of_folder(path.stem, (path, *folder.iterdir()), folder, config, lambda: TypedSource(open_mllm(path)))


def _of_folder(
    name: str, inputs: tuple[Path, ...], folder: Path, config: ModelConfig, open_source: Callable[[], Source]
) -> Checkpoint:
    """A checkpoint whose config, tokenizer and companions lie in ``folder``; refused before its weights are opened."""
    family = family_of(config)
    config = config.with_defaults(family.defaults)
    fields = family.header(config)
    if fields["rot_dim"] and not family.partial_rope:
        raise config.unsupported(
            f"partial_rotary_factor: transformers ignores it in family {family.name}, others do not; remove it or "
            "set it to 1"
        )
    return Checkpoint(
        name=name,
        inputs=inputs,
        config=config,
        family=family,
        source=open_source(),
        companions=read_companions(folder),
        tokenizer=lambda vocab, progress: folder_tokenizer(folder, vocab, progress),
    )


# ---------------------------------------------------------------------------------------------------------------------
# GGUF


def _open_gguf(path: Path) -> Checkpoint:
    model = open_gguf(path)
    architecture = architecture_of(model)
    config = gguf_config(model)
    family = family_of(config)
    return Checkpoint(
        name=path.stem,
        inputs=(path,),
        config=config.with_defaults(family.defaults),
        family=_as_gguf_has_it(family, architecture, model),
        source=TypedSource(model),
        companions=_companions_of(model),
        tokenizer=lambda vocab, progress: gguf_tokenizer(model, vocab, progress),
    )


def _as_gguf_has_it(family: Family, architecture: Architecture, model: GgufFile) -> Family:
    """The family with GGUF's names, row orders and norms. Layers for multi-token prediction come after the others."""
    left_out = [*family.left_out, f"^{re.escape(ROPE_FREQS)}$"]
    n_extra = model.get(f"{architecture.name}.nextn_predict_layers", int) or 0
    if n_extra:
        n_layers = model.require(f"{architecture.name}.block_count", int)
        left_out += [rf"^blk\.{i}\." for i in range(max(n_layers - n_extra, 0), n_layers)]
    return dataclasses.replace(family, layout=gguf_layout(architecture, family.layout), left_out=tuple(left_out))


def _companions_of(model: GgufFile) -> Companions:
    """Chat template, stop ids, special tokens and sampling defaults, in the words of a Hugging Face folder."""
    tokens = model.get("tokenizer.ggml.tokens", list) or []

    def text(kind: str) -> str | None:
        i = model.get(f"tokenizer.ggml.{kind}_token_id", int)
        return tokens[i] if i is not None and 0 <= i < len(tokens) else None

    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {key: found for key, kind in names.items() if (found := text(kind)) is not None}
    stops = [model.get(f"tokenizer.ggml.{kind}_token_id", int) for kind in ("eos", "eot", "eom")]
    generation = {"eos_token_id": [i for i in stops if i is not None]}
    keys = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    given = {key: model.metadata.get(f"general.sampling.{name}") for key, name in keys.items()}
    sampling = {key: entry.value for key, entry in given.items() if entry is not None}
    usable = {k: v for k, v in sampling.items() if isinstance(v, (int, float, np.number))}
    return Companions(generation | usable, special, model.get("tokenizer.chat_template", str))
