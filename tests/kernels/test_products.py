"""Matrix products: exact integer block sums, one float order, the same bits for vectors, batches and threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from krafla_cli.kernels import operations as ops
from krafla_cli.kernels.team import operation
from tests.kernels.steps import Codes, quantized, run


def _matrix(encoding: str, rows: int, cols: int, is_f16: bool, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 256, (rows, cols // 2), np.uint8)
    if encoding == "q8_0":
        q = rng.integers(-127, 128, (rows, cols), np.int8)
    d = (rng.uniform(-1, 1, (rows, cols // 32)) * 0.01).astype(np.float16 if is_f16 else np.float32)
    return {"q": q, "d": d, "is_f16": is_f16, "n_rows": rows, "n_blocks": cols // 32}


def _levels(matrix: dict[str, Any]) -> np.ndarray:
    """Whole weights [rows, blocks, 32]."""
    q, shape = matrix["q"], (matrix["n_rows"], matrix["n_blocks"], -1)
    if q.dtype == np.int8:
        return q.reshape(shape).astype(np.int64)
    blocks = q.reshape(shape).astype(np.int64)
    return np.concatenate((blocks & 15, blocks >> 4), axis=2) - 8


def _chain(matrix: dict[str, Any], codes: Codes, n: int) -> np.ndarray:
    """The product in the order of the kernels: fma(d, dx · sum, y) over ascending blocks; float64 makes the fma exact
    enough to round once (53 bits hold the 48-bit product; the sum rounds twice only at exact ties)."""
    sums = np.einsum("rbk,tbk->trb", _levels(matrix), codes.codes[:n].reshape(n, -1, 32).astype(np.int64))
    y = np.zeros((n, matrix["n_rows"]), np.float32)
    for b in range(matrix["n_blocks"]):
        scaled = sums[:, :, b].astype(np.float32) * codes.dx[:n, b, None]
        d = matrix["d"][:, b].astype(np.float64)
        y = (scaled.astype(np.float64) * d + y).astype(np.float32)
    return y


def _product(native: Any, matrix: dict[str, Any], codes: Codes, n: int, **more: Any) -> np.ndarray:
    y = more.pop("y", None)
    y = np.full((n, matrix["n_rows"]), np.nan, np.float32) if y is None else y.copy()
    run(native, ops.MATRIX, n, x=codes.codes, dx=codes.dx, sx=codes.sx, y=y, **matrix, **more)
    return y


def _row(codes: Codes, t: int) -> Codes:
    one = Codes(1, codes.codes.shape[1])
    one.codes[0], one.dx[0], one.sx[0] = codes.codes[t], codes.dx[t], codes.sx[t]
    return one


# Rows and columns that leave every kind of rest: tiles of 8 and 16 rows, fewer than 8 blocks, pieces of 32 blocks.
# All kernels that there are: those of this processor, and the others with what replaces their instructions.
MATMULS = {e: [operation(f"matmul{k}", f"matmul_{e}", ops.MATRIX) for k in ("", "_vnni")] for e in ops.MATMUL}
MATVECS = {
    "q8_0": [operation("matvec", "matvec_q8_0", ops.MATRIX)],
    "q4_0": [operation(f"matvec{k}", "matvec_q4_0", ops.MATRIX) for k in ("", "_vnni")],
}
SHAPES = [(1, 32), (3, 64), (8, 256), (20, 224), (33, 1184), (17, 2080)]


@pytest.mark.parametrize("is_f16", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("encoding", ["q8_0", "q4_0"])
def test_products(encoding: str, shape: tuple[int, int], is_f16: bool) -> None:
    rows, cols = shape
    matrix = _matrix(encoding, rows, cols, is_f16)
    n = 11
    codes = quantized(np.random.default_rng(1).standard_normal((n, cols)).astype(np.float32))
    want, *others = (
        np.concatenate([_product(matvec, matrix, _row(codes, t), 1) for t in range(n)]) for matvec in MATVECS[encoding]
    )
    np.testing.assert_allclose(want, _chain(matrix, codes, n), rtol=1e-6, atol=1e-7)
    for got in (*others, *(_product(matmul, matrix, codes, n) for matmul in MATMULS[encoding])):
        np.testing.assert_array_equal(got, want)
    assert ops.MATMUL[encoding] in MATMULS[encoding]
    assert ops.MATVEC[encoding] in MATVECS[encoding]


@pytest.mark.parametrize("encoding", ["q8_0", "q4_0"])
def test_extreme_codes_do_not_overflow(encoding: str) -> None:
    """All products at their largest, in every sign: the 16-bit sums inside must hold them."""
    for weight in (-127, 127) if encoding == "q8_0" else (0x00, 0xFF):
        for code in (-127, 127):
            matrix = _matrix(encoding, 16, 64, is_f16=False)
            matrix["q"][:] = weight
            codes = Codes(4, 64)
            codes.codes[:] = code
            codes.dx[:] = 1
            codes.sx[:] = -4 * 32 * code
            want = _chain(matrix, codes, 4)
            for matmul in MATMULS[encoding]:
                np.testing.assert_array_equal(_product(matmul, matrix, codes, 4), want)
            for matvec in MATVECS[encoding]:
                np.testing.assert_array_equal(_product(matvec, matrix, _row(codes, 0), 1), want[:1])


@pytest.mark.parametrize("encoding", ["q8_0", "q4_0"])
def test_adding_and_threads(encoding: str) -> None:
    matrix = _matrix(encoding, 75, 96, is_f16=True)
    rng = np.random.default_rng(2)
    codes = quantized(rng.standard_normal((5, 96)).astype(np.float32))
    before = rng.standard_normal((5, 75)).astype(np.float32)
    plain = _product(ops.MATMUL[encoding], matrix, codes, 5)
    for n_threads in (1, 2, 3):
        got = _product(ops.MATMUL[encoding], matrix, codes, 5, y=before, add=1, n_threads=n_threads)
        np.testing.assert_array_equal(got, before + plain)
        one = _product(ops.MATVEC[encoding], matrix, _row(codes, 3), 1, y=before[3:4], add=1, n_threads=n_threads)
        np.testing.assert_array_equal(one, (before + plain)[3:4])


def test_embedding_rows() -> None:
    for encoding, is_f16 in (("q8_0", True), ("q4_0", False), ("q4_0", True)):
        matrix = _matrix(encoding, 9, 64, is_f16)
        x = np.zeros((3, 64), np.float32)
        operands = {k: matrix[k] for k in ("q", "d", "is_f16")}
        run(
            ops.EMBED_ROWS, ops.EMBED, 3, ids=[8, 0, 4], is_q4=encoding == "q4_0", n_cols=64, scale=2.5, x=x, **operands
        )
        weights = _levels(matrix).astype(np.float32) * matrix["d"].astype(np.float32)[:, :, None]
        np.testing.assert_array_equal(x, weights.reshape(9, 64)[[8, 0, 4]] * np.float32(2.5))
