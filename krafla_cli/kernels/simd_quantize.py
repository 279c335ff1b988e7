"""The vector operations that only quantizers need; see :mod:`~krafla_cli.kernels.simd`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic

from krafla_cli.kernels.simd import Typed, _cast, _store
from krafla_cli.kernels.simd_lowering import folded, rows_of_4_columns
from krafla_cli.kernels.simd_types import (
    IR_ELEMENTS,
    Vec,
    constant,
    element_pointer,
    extern,
    f32x8,
    i8x16,
    i32x8,
    mask8,
)

_i8x8 = Vec("i8", 8)
_i16x8 = Vec("i16", 8)
_f64x8 = ir.VectorType(ir.DoubleType(), 8)


@intrinsic
def load_bf16(typingctx: Any, p: Any, i: Any) -> Typed:
    """8 bfloat16 widened to float32, exactly."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source = element_pointer(context, builder, sig.args[0], *args)
        half = builder.load(builder.bitcast(source, _i16x8.ir.as_pointer()))
        half.align = 1
        word = builder.shl(builder.zext(half, i32x8.ir), constant(i32x8, 16))
        return builder.bitcast(word, f32x8.ir)

    return f32x8(p, types.intp), build


def _load_8_bytes(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
    source = element_pointer(context, builder, sig.args[0], *args)
    value = builder.load(builder.bitcast(source, _i8x8.ir.as_pointer()))
    value.align = 1
    return value


@intrinsic
def load_bytes(typingctx: Any, p: Any, i: Any) -> Typed:
    """8 bytes, 0 to 255, as int32."""
    return i32x8(p, types.intp), lambda c, b, sig, args: b.zext(_load_8_bytes(c, b, sig, args), i32x8.ir)


@intrinsic
def load_i8_f32(typingctx: Any, p: Any, i: Any) -> Typed:
    """8 int8 as float32."""
    return f32x8(p, types.intp), lambda c, b, sig, args: b.sitofp(_load_8_bytes(c, b, sig, args), f32x8.ir)


@intrinsic
def round_even(typingctx: Any, x: Any) -> Typed:
    """The nearest integers, ties to even, as float32; 8 or 16."""
    return x(x), lambda c, b, sig, args: b.call(extern(b, f"llvm.rint.v{x.n}f32", x.ir, x.ir), args)


@intrinsic
def rows_of_columns(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Typed:
    """4 vectors of a word for each of 8 rows, to 8 rows of 4 words: a tuple of i8x16."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return context.make_tuple(builder, sig.return_type, rows_of_4_columns(builder, list(args)))

    return types.UniTuple(i8x16, 8)(*[i32x8] * 4), build


@intrinsic
def store_i8x16(typingctx: Any, p: Any, i: Any, v: Any) -> Typed:
    """16 bytes."""
    return _store(i8x16, p)


@intrinsic
def square_root(typingctx: Any, x: Any) -> Typed:
    return f32x8(f32x8), lambda c, b, sig, args: b.call(extern(b, "llvm.sqrt.v8f32", f32x8.ir, f32x8.ir), args)


@intrinsic
def all_set(typingctx: Any, mask: Any) -> Typed:
    """Whether the mask is set in all 8 elements."""
    byte = IR_ELEMENTS["i8"]

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.icmp_unsigned("==", builder.bitcast(args[0], byte), ir.Constant(byte, 255))

    return types.boolean(mask8), build


@intrinsic
def as_i32(typingctx: Any, p: Any) -> Typed:
    """The same address as a pointer to int32."""
    return _cast(types.CPointer(types.int32), p)


@intrinsic
def as_i64(typingctx: Any, p: Any) -> Typed:
    """The same address as a pointer to int64."""
    return _cast(types.CPointer(types.int64), p)


@intrinsic
def as_f64(typingctx: Any, p: Any) -> Typed:
    """The same address as a pointer to float64."""
    return _cast(types.CPointer(types.float64), p)


@intrinsic
def largest_bits(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Typed:
    """The bits of the largest magnitude in four vectors, as int32; those of a NaN where there is one."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        def larger(x: ir.Value, y: ir.Value) -> ir.Value:
            return builder.select(builder.icmp_signed(">", x, y), x, y)

        magnitude = constant(i32x8, 0x7FFFFFFF)
        a, b, c, d = (builder.and_(builder.bitcast(x, i32x8.ir), magnitude) for x in args)
        return folded(builder, larger(larger(a, b), larger(c, d)), larger)

    return types.int32(*[f32x8] * 4), build


def _f64_at(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
    place = element_pointer(context, builder, sig.args[0], args[0], args[1])
    return builder.bitcast(place, _f64x8.as_pointer())


@intrinsic
def clear_f64(typingctx: Any, p: Any, i: Any) -> Typed:
    """Sets the 8 float64 at ``p[i]`` to 0."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store(ir.Constant(_f64x8, [0.0] * 8), _f64_at(context, builder, sig, args)).align = 1
        return context.get_dummy_value()

    return types.void(p, types.intp), build


@intrinsic
def add_squares_f64(typingctx: Any, p: Any, i: Any, x: Any) -> Typed:
    """Adds the squares of 8 float32, as float64, to the 8 float64 at ``p[i]``."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        place = _f64_at(context, builder, sig, args)
        before = builder.load(place)
        before.align = 1
        wide = builder.fpext(args[2], _f64x8)
        builder.store(builder.fadd(before, builder.fmul(wide, wide)), place).align = 1
        return context.get_dummy_value()

    return types.void(p, types.intp, f32x8), build


def _squares(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    wide = builder.fpext(x, _f64x8)
    return builder.fmul(wide, wide)


def _add_four(context: Any, builder: ir.IRBuilder, sig: Any, args: Any, terms: list[ir.Value]) -> ir.Value:
    """Adds (0+1)+(2+3) of four vectors to the 8 float64 in memory."""
    place = _f64_at(context, builder, sig, args)
    before = builder.load(place)
    before.align = 1
    pairs = builder.fadd(builder.fadd(terms[0], terms[1]), builder.fadd(terms[2], terms[3]))
    builder.store(builder.fadd(before, pairs), place).align = 1
    return context.get_dummy_value()


@intrinsic
def add_block_squares_f64(typingctx: Any, p: Any, i: Any, a: Any, b: Any, c: Any, d: Any) -> Typed:
    """Adds the squares of four vectors, as float64, to the 8 float64 at ``p[i]``."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _add_four(context, builder, sig, args, [_squares(builder, x) for x in args[2:]])

    return types.void(p, types.intp, *[f32x8] * 4), build


@intrinsic
def add_weighted_squares_f64(
    typingctx: Any, p: Any, i: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any
) -> Typed:
    """The same for a², b², c², d², times e, f, g, h."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        pairs = zip(args[2:6], args[6:], strict=True)
        terms = [builder.fmul(_squares(builder, x), builder.fpext(w, _f64x8)) for x, w in pairs]
        return _add_four(context, builder, sig, args, terms)

    return types.void(p, types.intp, *[f32x8] * 8), build


@intrinsic
def sum_f64(typingctx: Any, p: Any, i: Any) -> Typed:
    """The sum of the 8 float64 at ``p[i]``: ((0+4)+(2+6)) + ((1+5)+(3+7))."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        values = builder.load(_f64_at(context, builder, sig, args))
        values.align = 1
        return folded(builder, values, builder.fadd)

    return types.float64(p, types.intp), build
