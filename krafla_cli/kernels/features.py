"""What the processor can do that kernels make use of. ``MLB_SIMD`` forbids some of it: see :mod:`~.simd`."""

from __future__ import annotations

import os

import llvmlite.binding as llvm

FEATURES = llvm.get_host_cpu_features()
_ALLOWED = os.environ.get("MLB_SIMD", "")
# x86 instructions for 256 bits, with f16; and those for 512 bits, with sums of products of four bytes (VNNI).
AVX2 = _ALLOWED != "generic" and all(FEATURES.get(name) for name in ("avx2", "fma", "f16c"))
AVX512 = _ALLOWED not in ("generic", "avx2") and AVX2 and all(FEATURES.get(name) for name in ("avx512bw", "avx512vnni"))
