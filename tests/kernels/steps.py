"""Running one kernel operation on arrays, as programs do."""

from __future__ import annotations

from typing import Any

import numpy as np

from krafla_cli.kernels import operations as ops
from krafla_cli.kernels.native import Native
from krafla_cli.kernels.structs import Struct
from krafla_cli.kernels.team import STEP, Call, Program, Team

SCRATCH_BYTES = ops.scratch_bytes(n_cols=8192, n_positions=64, head_dim=512)


def run(
    native: Native,
    layout: Struct,
    n_tokens: int = 1,
    position: int = 0,
    n_threads: int = 1,
    ids: Any = None,
    **operands: Any,
) -> np.ndarray:
    """Runs an operation; the results are in its operands. Returns step.fault."""
    fault = np.zeros(3, np.int64)
    ids = np.zeros(1, np.int64) if ids is None else np.asarray(ids, np.int64)
    step = STEP.pack(n_tokens=n_tokens, position=position, ids=ids, fault=fault)
    Team(n_threads, SCRATCH_BYTES).run(Program([Call(native, layout.pack(**operands))]), step)
    return fault


class Codes:
    """Room for the codes of ``n_tokens`` inputs of ``n_cols`` channels, padded as matrix products read them."""

    def __init__(self, n_tokens: int, n_cols: int) -> None:
        rows = -(-n_tokens // ops.POSITIONS_PER_TILE) * ops.POSITIONS_PER_TILE
        self.codes = np.zeros((rows, n_cols), np.int8)
        self.dx = np.zeros((rows, n_cols // 32), np.float32)
        self.sx = np.zeros((rows, n_cols // 32), np.int16)

    @property
    def operands(self) -> dict[str, Any]:
        return {"codes": self.codes, "dx": self.dx, "sx": self.sx}


def quantized(x: np.ndarray) -> Codes:
    """The codes of ``x`` float32 [T, n_cols] by the kernel."""
    codes = Codes(*x.shape)
    x = np.ascontiguousarray(x, np.float32).copy()
    run(ops.GATE_QUANTIZE, ops.GATED, len(x), x=x, n_cols=x.shape[1], **codes.operands)
    return codes
