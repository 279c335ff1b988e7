"""The vector operations that LEMB's forward pass and the search need besides those of :mod:`~krafla_cli.kernels.simd`.

Small integers widened to float32, and sums in float64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic

from krafla_cli.kernels.simd import Typed
from krafla_cli.kernels.simd_lowering import folded
from krafla_cli.kernels.simd_types import I32, IR_ELEMENTS, Vec, constant, element_pointer, extern, f32x8, i32x8, spread

f64x8 = Vec("f64", 8)
_i8x8 = Vec("i8", 8)


def _loaded(context: Any, builder: ir.IRBuilder, sig: Any, args: Any, kind: ir.Type) -> ir.Value:
    """A value of LLVM type ``kind`` at p[i]."""
    source = element_pointer(context, builder, sig.args[0], args[0], args[1])
    value = builder.load(builder.bitcast(source, kind.as_pointer()))
    value.align = 1
    return value


@intrinsic
def load_int8(typingctx: Any, p: Any, i: Any) -> Typed:
    """8 int8 from p[i] on, as float32."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.sitofp(_loaded(context, builder, sig, args, _i8x8.ir), f32x8.ir)

    return f32x8(p, types.intp), build


@intrinsic
def load_int4(typingctx: Any, p: Any, i: Any) -> Typed:
    """8 signed nibbles in 4 bytes from p[i] on, low nibble first, as float32."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        word = spread(builder, _loaded(context, builder, sig, args, I32), i32x8)
        high = builder.shl(word, constant(i32x8, [28 - 4 * k for k in range(8)]))
        return builder.sitofp(builder.ashr(high, constant(i32x8, 28)), f32x8.ir)

    return f32x8(p, types.intp), build


@intrinsic
def load_ternary(typingctx: Any, p: Any, i: Any) -> Typed:
    """8 two-bit codes in 2 bytes from p[i] on, low bits first (0, 1, 2: -1), as float32."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        half = builder.zext(_loaded(context, builder, sig, args, IR_ELEMENTS["i16"]), I32)
        codes = builder.lshr(spread(builder, half, i32x8), constant(i32x8, [2 * k for k in range(8)]))
        one = constant(i32x8, 1)
        minus = builder.and_(builder.lshr(codes, one), one)
        return builder.sitofp(builder.sub(builder.and_(codes, one), minus), f32x8.ir)

    return f32x8(p, types.intp), build


# ---------------------------------------------------------------------------------------------------------------------
# float64


@intrinsic
def zero_f64(typingctx: Any) -> Typed:
    return f64x8(), lambda c, b, sig, args: constant(f64x8, 0.0)


@intrinsic
def load_f64(typingctx: Any, p: Any, i: Any) -> Typed:
    """8 float64."""
    return f64x8(p, types.intp), lambda c, b, sig, args: _loaded(c, b, sig, args, f64x8.ir)


@intrinsic
def load_int8_f64(typingctx: Any, p: Any, i: Any) -> Typed:
    """8 int8 from p[i] on, as float64."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.sitofp(_loaded(context, builder, sig, args, _i8x8.ir), f64x8.ir)

    return f64x8(p, types.intp), build


@intrinsic
def widen(typingctx: Any, x: Any) -> Typed:
    """8 float32 as float64."""
    return f64x8(f32x8), lambda c, b, sig, args: b.fpext(args[0], f64x8.ir)


@intrinsic
def fma_f64(typingctx: Any, x: Any, y: Any, z: Any) -> Typed:
    """x · y + z, rounded once."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.call(extern(builder, "llvm.fma.v8f64", f64x8.ir, *[f64x8.ir] * 3), args)

    return f64x8(f64x8, f64x8, f64x8), build


@intrinsic
def total_f64(typingctx: Any, x: Any) -> Typed:
    """((0+4)+(2+6)) + ((1+5)+(3+7))."""
    return types.float64(f64x8), lambda c, b, sig, args: folded(b, args[0], b.fadd)
