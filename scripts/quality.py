"""How far quantized models are from their checkpoint: plain and importance-weighted error of all matrices together.

Usage: python scripts/quality.py CHECKPOINT IMATRIX MODEL.mlb...

The relative error is the root of the summed squared errors over the summed squares of the weights, over all matrices.
Weighted: each square times the importance of its input channel (the slots of IMATRIX; 1 for those that have none). A
GGUF file of llama.cpp is measured as the .mlb that `mlb convert` makes of it, which copies its Q4_0 and Q8_0 blocks.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from krafla_cli.convert.checkpoint import Checkpoint, open_checkpoint
from krafla_cli.convert.importance import Importance
from krafla_cli.convert.plan import Options
from krafla_cli.convert.tensors import errors_against_source
from krafla_cli.formats import mli
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.progress import SILENT
from krafla_cli.quant.blocks import Quantized
from krafla_cli.quant.errors import Errors


def errors_of_model(path: Path, checkpoint: Checkpoint, imatrix: mli.Imatrix) -> Errors:
    """The summed errors of all matrices of the model ``path``."""
    model = open_mlb(path)
    importance = Importance(imatrix, model.header, "imatrix", SILENT)
    total = Errors()
    for tensor in checkpoint.plan(Options("q4")).tensors:
        if tensor.spec.is_quantized:
            matrix = model.quantized(tensor.spec.name)
            spec = replace(tensor.spec, encoding=matrix.encoding)
            channels = importance.of(replace(spec, encoding="q4_0"))
            stored = Quantized(matrix.q, matrix.d)
            total += errors_against_source(replace(tensor, spec=spec), checkpoint.source, stored, channels)
    return total


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("imatrix", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    options = parser.parse_args()
    checkpoint, imatrix = open_checkpoint(options.checkpoint), mli.read(options.imatrix)
    print(f"{'model':<24} {'bits/weight':>11} {'error':>8} {'weighted':>9}")
    for path in options.models:
        errors = errors_of_model(path, checkpoint, imatrix)
        n_weights = sum(s.n_weights for s in open_mlb(path).tensors.values() if s.encoding != "u8")
        bits = 8 * path.stat().st_size / n_weights
        print(f"{path.stem:<24} {bits:>11.3f} {errors.relative:>8.5f} {errors.relative_weighted:>9.5f}")


if __name__ == "__main__":
    main()
