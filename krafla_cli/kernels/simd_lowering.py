"""How vector operations become LLVM instructions where one is not enough: the building blocks of simd.py.

Plain functions on LLVM values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from krafla_cli.kernels.features import AVX2
from krafla_cli.kernels.simd_types import (
    I32,
    IR_ELEMENTS,
    Vec,
    constant,
    extern,
    f32x8,
    i8x16,
    i8x32,
    i16x16,
    i32x8,
    shuffle,
)

_I16 = IR_ELEMENTS["i16"]
_i32x16 = Vec("i32", 16)


def folded(builder: ir.IRBuilder, v: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Element 0 of v folded in halves: ((0,4),(2,6)),((1,5),(3,7))."""
    for distance in (4, 2, 1):
        v = combine(v, shuffle(builder, v, v, [(i + distance) % 8 for i in range(8)]))
    return builder.extract_element(v, ir.Constant(I32, 0))


def transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """8x8 elements: at each step, rows a step apart exchange blocks of that size."""
    for step in (4, 2, 1):
        first = [i for i in range(16) if i % 8 // step % 2 == 0]
        low = sorted(first, key=lambda i: (i % 8 // (2 * step), i // 8, i % 8))
        high = [i + step for i in low]
        pairs = [(i, i + step) for i in range(8) if i // step % 2 == 0]
        out: list[Any] = [None] * 8
        for i, j in pairs:
            out[i] = shuffle(builder, rows[i], rows[j], low)
            out[j] = shuffle(builder, rows[i], rows[j], high)
        rows = out
    return rows


def pinned(builder: ir.IRBuilder, v: ir.Value) -> ir.Value:
    """``v``, past an empty piece of assembly: LLVM does not reorder or merge what makes it with what uses it."""
    if not AVX2:
        return v
    return builder.asm(ir.FunctionType(v.type, [v.type]), "", "=x,0", [v], side_effect=True)


def multiply_pairs_i16(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """16-bit products as int32, neighbours added."""
    if AVX2:
        return builder.call(extern(builder, "llvm.x86.avx2.pmadd.wd", i32x8.ir, i16x16.ir, i16x16.ir), [x, y])
    return sum_of_neighbours(builder, builder.mul(*(builder.sext(v, _i32x16.ir) for v in (x, y))))


def sum_of_neighbours(builder: ir.IRBuilder, v: ir.Value) -> ir.Value:
    """Elements 0 + 1, 2 + 3, ..."""
    n = v.type.count
    return builder.add(shuffle(builder, v, v, range(0, n, 2)), shuffle(builder, v, v, range(1, n, 2)))


def _unpack_and_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, bits: int, total: Vec) -> ir.Value:
    """In each 128-bit half: the ``bits``-wide units of a and b taken in turn, first half of them plus second half."""
    units = Vec(f"i{bits}", 256 // bits)
    half = units.n // 2
    a, b = builder.bitcast(a, units.ir), builder.bitcast(b, units.ir)
    first = [k * half + i + s * units.n for k in (0, 1) for i in range(half // 2) for s in (0, 1)]
    low, high = shuffle(builder, a, b, first), shuffle(builder, a, b, [i + half // 2 for i in first])
    return builder.add(builder.bitcast(low, total.ir), builder.bitcast(high, total.ir))


def folded_rows(builder: ir.IRBuilder, rows: list[ir.Value], total: Vec, widths: tuple[int, ...]) -> list[ir.Value]:
    """Vectors merged by pairs, once for each of ``widths`` in bits: each adds half of its row to the other half."""
    for bits in widths:
        rows = [_unpack_and_add(builder, rows[i], rows[i + 1], bits, total) for i in range(0, len(rows), 2)]
    return rows


def columns_of_rows(builder: ir.IRBuilder, rows: list[ir.Value], n_columns: int) -> list[ir.Value]:
    """8 rows of ``n_columns`` (4 or 8) groups of 4 bytes to ``n_columns`` vectors: column g of every row."""
    words = [builder.bitcast(r, ir.VectorType(I32, n_columns)) for r in rows]
    if n_columns == 4:
        words = [shuffle(builder, words[i], words[i + 4], range(8)) for i in range(4)]
        pairs = [[0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]]
        a, b = ([shuffle(builder, words[i], words[i + 1], p) for p in pairs] for i in (0, 2))
        quads = [[0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]]
        out = [shuffle(builder, a[k], b[k], q) for k in (0, 1) for q in quads]
    else:
        out = transposed(builder, words)
    return [builder.bitcast(v, i8x32.ir) for v in out]


def rows_of_4_columns(builder: ir.IRBuilder, columns: list[ir.Value]) -> list[ir.Value]:
    """4 vectors of 8 words to 8 rows of 16 bytes: word r of every vector."""
    pairs = [[0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]]
    a, b = ([shuffle(builder, columns[i], columns[i + 1], p) for p in pairs] for i in (0, 2))
    quads = [[0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]]
    both = [shuffle(builder, a[k], b[k], q) for k in (0, 1) for q in quads]  # rows 0 and 4, 1 and 5, ...
    halves = [shuffle(builder, v, v, range(h, h + 4)) for h in (0, 4) for v in both]
    return [builder.bitcast(v, i8x16.ir) for v in halves]


# ---------------------------------------------------------------------------------------------------------------------
# f16 without instructions for it


def widened_f16(b: ir.IRBuilder, h: ir.Value) -> ir.Value:
    """f16 bits to float32: the exponent moves by a multiplication, which makes subnormals normal."""
    wide = b.zext(h, i32x8.ir)
    sign = b.shl(b.and_(wide, constant(i32x8, 0x8000)), constant(i32x8, 16))
    rest = b.shl(b.and_(wide, constant(i32x8, 0x7FFF)), constant(i32x8, 13))
    value = b.bitcast(b.fmul(b.bitcast(rest, f32x8.ir), constant(f32x8, 2.0**112)), i32x8.ir)
    special = b.icmp_signed(">=", rest, constant(i32x8, 0x7C00 << 13))  # infinity and NaN
    value = b.select(special, b.or_(rest, constant(i32x8, 0x7F800000)), value)
    return b.bitcast(b.or_(value, sign), f32x8.ir)


def narrowed_f16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """float32 to f16 bits, nearest, ties to even."""
    word = b.bitcast(x, i32x8.ir)
    sign = b.and_(b.lshr(word, constant(i32x8, 16)), constant(i32x8, 0x8000))
    size = b.and_(word, constant(i32x8, 0x7FFFFFFF))
    # Subnormal results: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
    small = b.bitcast(b.fadd(b.bitcast(size, f32x8.ir), constant(f32x8, 0.5)), i32x8.ir)
    small = b.sub(small, constant(i32x8, 0x3F000000))
    odd = b.and_(b.lshr(size, constant(i32x8, 13)), constant(i32x8, 1))
    normal = b.lshr(
        b.add(b.add(b.sub(size, constant(i32x8, 112 << 23)), constant(i32x8, 0xFFF)), odd), constant(i32x8, 13)
    )
    out = b.select(b.icmp_signed("<", size, constant(i32x8, 113 << 23)), small, normal)
    out = b.select(b.icmp_signed(">=", size, constant(i32x8, 143 << 23)), constant(i32x8, 0x7C00), out)
    out = b.select(b.icmp_signed(">", size, constant(i32x8, 0x7F800000)), constant(i32x8, 0x7E00), out)
    return b.trunc(b.or_(out, sign), ir.VectorType(_I16, 8))
