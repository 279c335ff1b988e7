"""The data types of tensors in GGUF and MLLM files: names, numbers, sizes. How they are decoded is in ``quant.types``.

Sources: the MLLM documentation, "Data Types in MLLM" (numbers and versions); the GGUF specification (ggml_type) and
the block structures of ggml (sizes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DataType:
    """One data type: ``block`` weights are stored in ``n_bytes``.

    ``ggml``, ``mllm``: its number in GGUF and MLLM files, None where the format does not have it. ``mllm_version``: the
    first version of MLLM files with it. ``rows``: rows of a matrix that are interleaved, so that they are decoded
    together (1: each row stands alone). ``block`` 0: the layout is not public, the size cannot be checked.
    """

    name: str
    block: int
    n_bytes: int
    ggml: int | None = None
    mllm: int | None = None
    mllm_version: int | None = None
    rows: int = 1

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.n_bytes / self.block if self.block else math.nan

    def size(self, n_weights: int) -> int | None:
        """Bytes of ``n_weights``; None where they are no whole blocks, or the layout is unknown."""
        if self.block == 0 or n_weights % self.block:
            return None
        return n_weights // self.block * self.n_bytes


def _ggml(name: str, number: int, block: int, n_bytes: int, mllm: int | None = None, rows: int = 1) -> DataType:
    return DataType(name, block, n_bytes, number, mllm, None if mllm is None else 1, rows)


def _mllm(name: str, number: int, block: int, n_bytes: int, version: int = 2, rows: int = 1) -> DataType:
    return DataType(name, block, n_bytes, None, number, version, rows)


DATA_TYPES = (
    _ggml("F32", 0, 1, 4, mllm=0),
    _ggml("F16", 1, 1, 2, mllm=1),
    _ggml("Q4_0", 2, 32, 18, mllm=2),
    _ggml("Q4_1", 3, 32, 20, mllm=3),
    _ggml("Q5_0", 6, 32, 22),
    _ggml("Q5_1", 7, 32, 24),
    _ggml("Q8_0", 8, 32, 34, mllm=8),
    _ggml("Q8_1", 9, 32, 36, mllm=9),
    _ggml("Q2_K", 10, 256, 84, mllm=24),
    _ggml("Q3_K", 11, 256, 110, mllm=23),
    _ggml("Q4_K", 12, 256, 144, mllm=12),
    _ggml("Q5_K", 13, 256, 176),
    _ggml("Q6_K", 14, 256, 210, mllm=14),
    _ggml("Q8_K", 15, 256, 292, mllm=15),
    _ggml("IQ2_XXS", 16, 256, 66, mllm=26),
    _ggml("IQ2_XS", 17, 256, 74, mllm=27),
    _ggml("IQ3_XXS", 18, 256, 98),
    _ggml("IQ1_S", 19, 256, 50, mllm=28),
    _ggml("IQ4_NL", 20, 32, 18),
    _ggml("IQ3_S", 21, 256, 110),
    _ggml("IQ2_S", 22, 256, 82, mllm=30),
    _ggml("IQ4_XS", 23, 256, 136),
    _ggml("I8", 24, 1, 1, mllm=16),
    _ggml("I16", 25, 1, 2, mllm=17),
    _ggml("I32", 26, 1, 4, mllm=18),
    DataType("I64", 1, 8, ggml=27, mllm=132, mllm_version=2),
    _ggml("F64", 28, 1, 8),
    _ggml("IQ1_M", 29, 256, 56, mllm=29),
    DataType("BF16", 1, 2, ggml=30, mllm=128, mllm_version=2),
    _ggml("Q4_0_4_4", 31, 32, 18, mllm=19, rows=4),
    _ggml("Q4_0_4_8", 32, 32, 18, mllm=20, rows=4),
    _ggml("Q4_0_8_8", 33, 32, 18, mllm=21, rows=8),
    _ggml("TQ1_0", 34, 256, 54),
    _ggml("TQ2_0", 35, 256, 66),
    _ggml("GGML_MXFP4", 39, 32, 17),  # scale first, halves apart; MLLM's MXFP4 is laid out otherwise
    _ggml("NVFP4", 40, 64, 36),
    _mllm("Q8_PERTENSOR", 10, 32, 32, version=1),
    _mllm("Q8_0_4_4", 22, 32, 34, version=1, rows=4),
    _mllm("Q1_K", 25, 0, 0, version=1),
    _mllm("U8", 129, 1, 1),
    _mllm("U16", 130, 1, 2),
    _mllm("U32", 131, 1, 4),
    _mllm("U64", 133, 1, 8),
    _mllm("BYTE", 134, 1, 1),
    _mllm("MXFP4", 135, 32, 17),
)
BY_NAME = {t.name: t for t in DATA_TYPES}
BY_GGML = {t.ggml: t for t in DATA_TYPES if t.ggml is not None}
BY_MLLM = {t.mllm: t for t in DATA_TYPES if t.mllm is not None}
