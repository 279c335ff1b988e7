"""Decoding of every data type that GGUF and MLLM files have, and encoding of those that this tool writes.

What the gguf package decodes goes through it; what it lacks is here, each with the source of its layout.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import DataError, ShapeError, UnsupportedError
from krafla_cli.formats.data_types import BY_NAME, DataType
from krafla_cli.quant import ggml_blocks, matrix, mxfp4
from krafla_cli.quant.blocks import widen

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_PLAIN = {
    "F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
    "U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
}  # fmt: skip
# Names here and in the gguf package.
_BY_GGUF = {
    **{
        name: name
        for name in (
            *("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "NVFP4", "IQ1_S"),
            *("IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
        )
    },
    "GGML_MXFP4": "MXFP4",
}
_OPAQUE = {
    "Q1_K": "the layout of its blocks is not published",
    "BYTE": "it holds bytes whose meaning only their writer knows",
}


def check_decodable(kind: DataType) -> None:
    """Raises UnsupportedError, saying why, for a type that stands for no numbers or for none without its scale."""
    if kind.name in _OPAQUE:
        raise UnsupportedError(f"{kind.name}: {_OPAQUE[kind.name]}")
    if kind.name == "Q8_PERTENSOR":
        raise UnsupportedError(f"{kind.name}: its scale is not in the tensor")


def dequantize(data: Bytes, kind: DataType, shape: tuple[int, ...], scale: float | None = None) -> Float32:
    """The weights in ``data`` (uint8, any shape) as float32 in ``shape``.

    Integers come as their value (beyond 2^24, the nearest float32); ``scale`` is that of Q8_PERTENSOR. Raises
    UnsupportedError (opaque types), ShapeError (``data`` does not fit ``shape``), DataError (an MXFP4 scale of NaN).
    """
    if kind.name != "Q8_PERTENSOR" or scale is None:
        check_decodable(kind)
    n_weights = int(np.prod(shape, dtype=np.int64))
    expected = kind.size(n_weights)
    flat = data.reshape(-1)
    if expected != flat.size:
        raise ShapeError(f"{kind.name}: {flat.size} bytes for {n_weights} weights, must be {expected}")
    if kind.name in _PLAIN:
        return flat.view(_PLAIN[kind.name]).astype(np.float32).reshape(shape)
    if kind.name == "BF16":
        return widen(flat.view("<u2")).reshape(shape)
    if kind.name in ("Q4_0", "Q8_0"):
        return _mlb_blocks(flat, kind, shape)
    if kind.rows > 1:
        return _interleaved(flat, kind, shape)
    return _decoder(kind, scale)(flat.reshape(-1, kind.n_bytes)).reshape(shape)


def quantize(values: Float32, kind: DataType) -> Bytes:
    """``values`` float32 [rows, cols] as blocks, uint8 [rows, row bytes]; for Q4_0, Q8_0 and MXFP4.

    Q8_0: d = max |x| / 127, rounded to f16 first. Q4_0: d = largest / -8, as llama.cpp rounds. MXFP4: see
    :mod:`krafla_cli.quant.mxfp4`. All are the nearest level, saturating. Raises ShapeError (columns are no whole
    blocks), DataError (a weight that is not finite), UnsupportedError (another type).
    """
    rows, cols = values.shape
    if kind.name in ("Q4_0", "Q8_0"):
        encoding = kind.name.lower()
        return ggml_blocks.join(matrix.quantize(values, encoding, rule="round"), encoding)
    if kind.name != "MXFP4":
        raise UnsupportedError(f"{kind.name} is not written; Q4_0, Q8_0 and MXFP4 are")
    if cols == 0 or cols % mxfp4.BLOCK:
        raise ShapeError(f"rows of {cols} weights are not whole blocks of {mxfp4.BLOCK}")
    if not np.isfinite(values).all():
        raise DataError("a weight is NaN or infinite")
    return mxfp4.quantize_blocks(values.reshape(-1, mxfp4.BLOCK)).reshape(rows, -1)


def _mlb_blocks(flat: Bytes, kind: DataType, shape: tuple[int, ...]) -> Float32:
    """Blocks that the .mlb format has too; as one row, since a row may be no whole number of blocks."""
    encoding, n_weights = kind.name.lower(), flat.size // kind.n_bytes * kind.block
    blocks = ggml_blocks.split(flat, encoding, 1, n_weights)
    return matrix.dequantize(blocks.q, blocks.d, encoding, 1, n_weights).reshape(shape)


def _decoder(kind: DataType, scale: float | None) -> Callable[[Bytes], Float32]:
    """The function from blocks, uint8 [n, block bytes], to float32 [n, block]."""
    if kind.name == "Q8_PERTENSOR":
        # MLLM: block_q8_per_tensor is 32 int8; the one scale of the tensor is kept elsewhere.
        return lambda blocks: blocks.view(np.int8).astype(np.float32) * np.float32(scale or 0)
    if kind.name in _OWN:
        return _OWN[kind.name]
    return lambda blocks: _by_gguf(blocks, kind)


def _by_gguf(blocks: Bytes, kind: DataType) -> Float32:
    import gguf

    return np.asarray(gguf.dequantize(blocks, gguf.GGMLQuantizationType[_BY_GGUF[kind.name]]), np.float32)


def _q8_1(blocks: Bytes) -> Float32:
    """ggml's block_q8_1: f16 d, f16 d x sum of the quants, 32 int8. Weight = quant x d."""
    d = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    return blocks[:, 4:].view(np.int8).astype(np.float32) * d


def _q8_k(blocks: Bytes) -> Float32:
    """ggml's block_q8_K: f32 d, 256 int8, 16 int16 sums of 16 quants each. Weight = quant x d."""
    d = np.ascontiguousarray(blocks[:, :4]).view("<f4").astype(np.float32)
    return blocks[:, 4:260].view(np.int8).astype(np.float32) * d


_OWN: dict[str, Callable[[Bytes], Float32]] = {
    "Q8_1": _q8_1,
    "Q8_K": _q8_k,
    "MXFP4": mxfp4.dequantize_blocks,
}
# Type -> bytes of one row that lie together; the number of rows is the type's.
_CHUNK_BYTES = {"Q4_0_4_4": 4, "Q4_0_4_8": 8, "Q4_0_8_8": 8, "Q8_0_4_4": 4}


def deinterleave(data: Bytes, kind: DataType, rows: int, cols: int) -> Bytes:
    """Plain Q4_0 or Q8_0 blocks, uint8 [rows, row bytes], of the interleaved types.

    ggml's block_q4_0x4, block_q4_0x8, block_q8_0x4 hold the same block of 4 or 8 rows: their f16 scales, then their
    quants in turns of 4 or 8 bytes. Nibbles are stored as two's complement (level), Q4_0 has level + 8: bit 3 flipped.
    """
    if rows % kind.rows or cols % kind.block:
        raise ShapeError(f"{kind.name}: {rows} x {cols} weights are no groups of {kind.rows} rows in blocks of 32")
    encoding = "q4_0" if kind.name.startswith("Q4_0") else "q8_0"
    n_quants, chunk = ggml_blocks.QUANT_BYTES[encoding], _CHUNK_BYTES[kind.name]
    groups = data.reshape(rows // kind.rows, cols // 32, kind.rows * kind.n_bytes)
    scales = groups[:, :, : 2 * kind.rows].reshape(*groups.shape[:2], kind.rows, 2)
    quants = groups[:, :, 2 * kind.rows :].reshape(*groups.shape[:2], n_quants // chunk, kind.rows, chunk)
    quants = quants.swapaxes(2, 3).reshape(*groups.shape[:2], kind.rows, n_quants)
    if encoding == "q4_0":
        quants = quants ^ np.uint8(0x88)
    blocks = np.concatenate([scales, quants], axis=3)
    return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(rows, -1)


def _interleaved(flat: Bytes, kind: DataType, shape: tuple[int, ...]) -> Float32:
    if len(shape) < 2:
        raise ShapeError(f"{kind.name}: a vector has no rows to interleave")
    cols = shape[-1]
    plain = deinterleave(flat, kind, flat.size // kind.n_bytes * kind.block // cols, cols)
    return _mlb_blocks(plain.reshape(-1), BY_NAME[kind.name[:4]], shape)
