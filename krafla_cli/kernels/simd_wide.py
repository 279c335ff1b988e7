"""Vectors of 512 bits: two of the usual ones in one instruction where the processor has AVX-512, else two of them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic

from krafla_cli.kernels.features import AVX512
from krafla_cli.kernels.simd import Typed, _load, _store
from krafla_cli.kernels.simd_lowering import sum_of_neighbours
from krafla_cli.kernels.simd_types import I32, Vec, element_pointer, extern, f32x8, f32x16, i8x16, shuffle, spread

i32x16 = Vec("i32", 16)
i8x64 = Vec("i8", 64)
_i32x64 = Vec("i32", 64)


@intrinsic
def load_f32x16(typingctx: Any, p: Any, i: Any) -> Typed:
    """16 float32."""
    return f32x16(p, types.intp), _load(f32x16)


@intrinsic
def store_f32x16(typingctx: Any, p: Any, i: Any, v: Any) -> Typed:
    """16 float32."""
    return _store(f32x16, p)


@intrinsic
def twice(typingctx: Any, x: Any) -> Typed:
    """8 float32, and the same 8 again."""
    return f32x16(f32x8), lambda c, b, sig, args: shuffle(b, args[0], args[0], range(16))


def _half(builder: ir.IRBuilder, x: ir.Value, first: int) -> ir.Value:
    return shuffle(builder, x, x, range(first, first + 8))


@intrinsic
def first_half(typingctx: Any, x: Any) -> Typed:
    """Elements 0 to 7 of 16."""
    return f32x8(f32x16), lambda c, b, sig, args: _half(b, args[0], 0)


@intrinsic
def second_half(typingctx: Any, x: Any) -> Typed:
    """Elements 8 to 15 of 16."""
    return f32x8(f32x16), lambda c, b, sig, args: _half(b, args[0], 8)


@intrinsic
def spread_f32x16(typingctx: Any, x: Any) -> Typed:
    """``x`` in all 16 elements."""
    return f32x16(types.float32), lambda c, b, sig, args: spread(b, args[0], f32x16)


@intrinsic
def sum_of_halves(typingctx: Any, x: Any) -> Typed:
    """The first 8 of 16 elements plus the last 8."""
    return f32x8(f32x16), lambda c, b, sig, args: b.fadd(_half(b, args[0], 0), _half(b, args[0], 8))


@intrinsic
def load_i8x64(typingctx: Any, p: Any, i: Any) -> Typed:
    """64 bytes."""
    return i8x64(p, types.intp), _load(i8x64)


@intrinsic
def spread_i32x16(typingctx: Any, x: Any) -> Typed:
    """The integer ``x`` in all 16 elements, as int32."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return spread(builder, context.cast(builder, args[0], sig.args[0], types.int32), i32x16)

    return i32x16(x), build


def _added_products(builder: ir.IRBuilder, total: ir.Value, w: ir.Value, codes: ir.Value) -> ir.Value:
    """int32 ``total`` [16], and to each four products of unsigned bytes of ``w`` and signed ones of ``codes``."""
    if AVX512:
        function = extern(builder, "llvm.x86.avx512.vpdpbusd.512", i32x16.ir, *[i32x16.ir] * 3)
        return builder.call(function, [total, *(builder.bitcast(v, i32x16.ir) for v in (w, codes))])
    signed = builder.sext(builder.bitcast(codes, i8x64.ir), _i32x64.ir)
    products = builder.mul(builder.zext(w, _i32x64.ir), signed)
    return builder.add(total, sum_of_neighbours(builder, sum_of_neighbours(builder, products)))


@intrinsic
def add_products(typingctx: Any, total: Any, w: Any, x: Any) -> Typed:
    """int32 ``total`` [16], and to each the products of four unsigned bytes of ``w`` and signed ones of ``x``."""
    return i32x16(i32x16, i8x64, i8x64), lambda c, b, sig, args: _added_products(b, *args)


@intrinsic
def add_quads(typingctx: Any, total: Any, w: Any, p: Any, i: Any) -> Typed:
    """int32 ``total`` [16], and to each the products of four unsigned bytes of ``w`` and the signed ones at p[i]."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source = element_pointer(context, builder, sig.args[2], args[2], args[3])
        word = builder.load(builder.bitcast(source, I32.as_pointer()))
        word.align = 1
        return _added_products(builder, args[0], args[1], spread(builder, word, i32x16))

    return i32x16(i32x16, i8x64, p, types.intp), build


@intrinsic
def load_halves(typingctx: Any, p: Any, i: Any) -> Typed:
    """The first 16 bytes of each of four blocks of 32 from p[i] on."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        start = builder.bitcast(element_pointer(context, builder, sig.args[0], *args), i8x16.ir.as_pointer())
        parts = []
        for block in range(4):
            parts.append(builder.load(builder.gep(start, [ir.Constant(I32, 2 * block)])))
            parts[-1].align = 1
        low, high = (shuffle(builder, parts[k], parts[k + 1], range(32)) for k in (0, 2))
        return shuffle(builder, low, high, range(64))

    return i8x64(p, types.intp), build


def _repeated(context: Any, builder: ir.IRBuilder, sig: Any, args: Any, vec: Vec) -> ir.Value:
    """The elements of ``vec`` at p[i], each as often as makes 16."""
    source = element_pointer(context, builder, sig.args[0], *args)
    few = builder.load(builder.bitcast(source, vec.ir.as_pointer()))
    few.align = 1
    return shuffle(builder, few, few, [k * vec.n // 16 for k in range(16)])


@intrinsic
def load_4_i16(typingctx: Any, p: Any, i: Any) -> Typed:
    """4 int16, as int32, each four times."""
    vec = Vec("i16", 4)
    return i32x16(p, types.intp), lambda c, b, sig, args: b.sext(_repeated(c, b, sig, args, vec), i32x16.ir)


@intrinsic
def load_2_f32(typingctx: Any, p: Any, i: Any) -> Typed:
    """2 float32, each eight times."""
    return f32x16(p, types.intp), lambda c, b, sig, args: _repeated(c, b, sig, args, Vec("f32", 2))


def _in_each_quarter(order: list[int]) -> list[int]:
    """``order`` of a quarter's 4 elements of two vectors (the second's count on from 4), for all four quarters."""
    return [4 * quarter + k % 4 + (k // 4) * 16 for quarter in range(4) for k in order]


def _sums_of_quarters(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """4 vectors to one: in each quarter, the sums of that quarter of every vector. 8 vectors to two."""
    for low, high in (([0, 4, 1, 5], [2, 6, 3, 7]), ([0, 1, 4, 5], [2, 3, 6, 7])):
        orders = _in_each_quarter(low), _in_each_quarter(high)
        rows = [
            builder.add(*(shuffle(builder, rows[i], rows[i + 1], order) for order in orders))
            for i in range(0, len(rows), 2)
        ]
    return rows


@intrinsic
def sums_of_4_blocks(typingctx: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Typed:
    """8 rows of 4 blocks of 4 sums: the total of each block of row 0, ..., row 7; blocks 0 and 1, blocks 2 and 3."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        first, last = _sums_of_quarters(builder, list(args))  # quarters are blocks; rows 0 to 3, 4 to 7
        order = [j + s for k in (0, 4) for s in (0, 16) for j in range(k, k + 4)]
        pairs = [shuffle(builder, first, last, [k + start for k in order]) for start in (0, 8)]
        return context.make_tuple(builder, sig.return_type, pairs)

    return types.UniTuple(i32x16, 2)(*[i32x16] * 8), build
