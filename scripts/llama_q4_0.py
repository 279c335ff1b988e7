"""A .mlb whose Q4_0 matrices llama.cpp has quantized with an importance matrix, for `mlb eval` and scripts/quality.py.

Usage: python scripts/llama_q4_0.py CHECKPOINT IMATRIX MODEL.mlb OUT.mlb [--llama PYTHON]

MODEL.mlb is a q4 model of CHECKPOINT by `mlb convert`: OUT.mlb differs from it in quants and scales only. llama.cpp's
own importance matrices cannot be given from Python, but its quantizer of rows takes the channels of IMATRIX.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import numpy as np
from llama_rows import quantize_rows

from krafla_cli.convert.checkpoint import open_checkpoint
from krafla_cli.convert.importance import Importance
from krafla_cli.convert.plan import Options
from krafla_cli.convert.tensors import load
from krafla_cli.formats import mli
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.formats.sidecar import files_beside
from krafla_cli.progress import SILENT
from krafla_cli.quant.blocks import widen


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("checkpoint", "imatrix", "model", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--llama", default=os.environ.get("MLB_BENCH_LLAMA"), help="default: $MLB_BENCH_LLAMA")
    options = parser.parse_args()
    if not options.llama:
        parser.error("give --llama PYTHON, or set MLB_BENCH_LLAMA")
    checkpoint, header = open_checkpoint(options.checkpoint), open_mlb(options.model).header
    importance = Importance(mli.read(options.imatrix), header, str(options.imatrix), SILENT)
    shutil.copyfile(options.model, options.out)
    for source, target in zip(files_beside(options.model), files_beside(options.out), strict=True):
        if source.exists():
            shutil.copyfile(source, target)
    data = np.memmap(options.out, np.uint8, "r+")
    tensors = [t for t in checkpoint.plan(Options("q4")).tensors if t.spec.encoding == "q4_0"]
    for tensor in tensors:
        spec = tensor.spec
        channels = importance.of(spec)
        matrices = {spec.name: widen(load(tensor, checkpoint.source))}
        given = {} if channels is None else {spec.name: channels}
        matrix = quantize_rows(options.llama, matrices, given)[spec.name]
        scales = matrix.d.astype(np.float16 if header.scale_f16 else np.float32)
        data[spec.offset : spec.offset + spec.n_bytes] = matrix.q.reshape(-1).view(np.uint8)
        data[spec.scale_offset : spec.scale_offset + spec.scale_bytes] = scales.reshape(-1).view(np.uint8)
    data.flush()
    print(f"wrote {options.out}: {len(tensors)} matrices by llama.cpp; its sidecar still has the hash of the other")


if __name__ == "__main__":
    main()
