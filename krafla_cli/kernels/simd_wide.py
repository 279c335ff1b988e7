"""Vectors of 512 bits: two of the usual ones in one instruction where the processor has AVX-512, else two of them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic

from krafla_cli.kernels.features import AVX512
from krafla_cli.kernels.simd import Typed, _load, _store
from krafla_cli.kernels.simd_lowering import sum_of_neighbours
from krafla_cli.kernels.simd_types import I32, Vec, element_pointer, extern, f32x8, f32x16, shuffle, spread

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


@intrinsic
def add_quads(typingctx: Any, total: Any, w: Any, p: Any, i: Any) -> Typed:
    """int32 ``total`` [16], and to each the products of four unsigned bytes of ``w`` and the signed ones at p[i]."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source = element_pointer(context, builder, sig.args[2], args[2], args[3])
        word = builder.load(builder.bitcast(source, I32.as_pointer()))
        word.align = 1
        codes = spread(builder, word, i32x16)
        if AVX512:
            weights = builder.bitcast(args[1], i32x16.ir)
            function = extern(builder, "llvm.x86.avx512.vpdpbusd.512", i32x16.ir, *[i32x16.ir] * 3)
            return builder.call(function, [args[0], weights, codes])
        signed = builder.sext(builder.bitcast(codes, i8x64.ir), _i32x64.ir)
        products = builder.mul(builder.zext(args[1], _i32x64.ir), signed)
        return builder.add(args[0], sum_of_neighbours(builder, sum_of_neighbours(builder, products)))

    return i32x16(i32x16, i8x64, p, types.intp), build
