"""Export to an MLLM file of version 2 under the names of Hugging Face; Q4_0 and Q8_0 blocks stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from krafla_cli.export.config import checkpoint_config
from krafla_cli.export.opened import OpenedModel
from krafla_cli.export.tensors import ScaleRounding, Target, block_encoding, blocks, checkpoint_targets, dense
from krafla_cli.formats.atomic import atomic_output
from krafla_cli.formats.data_types import BY_NAME
from krafla_cli.formats.mllm import MllmWriter, NewTensor
from krafla_cli.formats.sidecar import files_beside
from krafla_cli.formats.text import counted
from krafla_cli.progress import Progress
from krafla_cli.quant import ggml_blocks


def write_mllm(model: OpenedModel, path: Path, force: bool, progress: Progress) -> None:
    """Writes ``path``. Raises FileError, FormatError, UnsupportedError."""
    config = checkpoint_config(model)
    if model.provenance.get("family") != config.family:  # an MLLM file does not say what it is
        progress.warn(f"no settings say what the model was: names and rows are those of a {config.family} checkpoint")
    targets = checkpoint_targets(model.mlb, config.layout, config.hidden_dim)
    rounding = ScaleRounding(str(model.path))
    with atomic_output(path, force, inputs=(model.path, *files_beside(model.path))) as file:
        writer = MllmWriter(file, model.name[:100], [_new_tensor(t) for t in targets])
        progress.start("exporting", sum(t.n_bytes for t in targets), "B")
        try:
            for target in targets:
                encoding = block_encoding(target)
                if encoding is None:
                    writer.write(target.name, np.ascontiguousarray(dense(model.mlb, target), "<f4"))
                else:
                    matrix = rounding.rounded(target.name, blocks(model.mlb, target), encoding)
                    writer.write(target.name, ggml_blocks.join(matrix, encoding))
                progress.advance(target.n_bytes)
            writer.finish()
        finally:
            progress.finish()
    for remark in (*rounding.remarks(), *_decoded(targets)):
        progress.info(remark)


def _new_tensor(target: Target) -> NewTensor:
    encoding = block_encoding(target)
    return NewTensor(target.name, BY_NAME[encoding.upper() if encoding else "F32"], target.shape)


def _decoded(targets: list[Target]) -> Iterator[str]:
    """Matrices whose blocks do not fit: parts of two encodings in one, or columns that padding added."""
    names = [t.name for t in targets if t.pieces[0].spec.is_quantized and block_encoding(t) is None]
    if names:
        matrices = counted(len(names), "matrix", "matrices")
        yield f"written as F32, since their blocks do not fit: {matrices} ({names[0]}, ...)"
