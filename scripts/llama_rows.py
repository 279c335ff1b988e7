"""llama.cpp's Q4_0 quantizer of rows, with importances or without, run by the Python that has llama-cpp-python."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from krafla_cli.quant import ggml_blocks
from krafla_cli.quant.blocks import Quantized

Float32 = npt.NDArray[np.float32]

# Run by the other Python: matrices [rows, cols] and importances [cols] in .npz, Q4_0 blocks out.
_PROGRAM = """
import sys
from ctypes import c_int, c_int64, c_size_t, c_void_p
import numpy as np
from llama_cpp._ggml import libggml as ggml
ggml.ggml_quantize_chunk.restype = c_size_t
ggml.ggml_quantize_chunk.argtypes = [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]
given = np.load(sys.argv[1])
results = {}
for name in given.files:
    if name.startswith("w/"):
        w = given[name]
        importance = given["i/" + name[2:]] if "i/" + name[2:] in given.files else None
        out = np.empty((len(w), w.shape[1] // 32 * 18), np.uint8)
        place = None if importance is None else importance.ctypes.data
        ggml.ggml_quantize_chunk(2, w.ctypes.data, out.ctypes.data, 0, len(w), w.shape[1], place)
        results[name[2:]] = out
np.savez(sys.argv[2], **results)
"""


def quantize_rows(
    python: str, matrices: Mapping[str, Float32], importances: Mapping[str, Float32]
) -> dict[str, Quantized]:
    """Each of ``matrices`` float32 [rows, cols] as Q4_0; ``importances`` float32 [cols] of those that have them."""
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder) / "given.npz", Path(folder) / "results.npz"
        arrays = {f"w/{name}": np.ascontiguousarray(w, np.float32) for name, w in matrices.items()}
        arrays |= {f"i/{name}": np.ascontiguousarray(x, np.float32) for name, x in importances.items()}
        np.savez(given, **arrays)  # type: ignore[arg-type]
        subprocess.run([python, "-c", _PROGRAM, str(given), str(results)], check=True, capture_output=True)
        with np.load(results) as blocks:
            return {name: ggml_blocks.split(blocks[name], "q4_0", *w.shape) for name, w in matrices.items()}
