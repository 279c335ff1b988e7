"""Operations on vector values inside numba kernels: a kernel looks like its formula, LLVM sees vectors.

Each operation is an LLVM vector instruction. The few that x86 has as one instruction and LLVM has not (products of
bytes added in pairs, f16) have two lowerings: AVX2 (with F16C) where the host has it, and plain LLVM vector arithmetic
elsewhere, which gives the same bits; ``MLB_SIMD=generic`` forces the second. ``MLB_SIMD=avx2`` leaves out AVX-512.

``p`` is a typed pointer or a C-contiguous array, ``i`` an index in its elements; nothing is bounds-checked. Loads and
stores need no alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic

from krafla_cli.kernels.features import AVX2
from krafla_cli.kernels.simd_lowering import (
    columns_of_rows,
    folded,
    folded_rows,
    multiply_pairs_i16,
    narrowed_f16,
    pinned,
    sum_of_neighbours,
    transposed,
    widened_f16,
)
from krafla_cli.kernels.simd_types import (
    I32,
    IR_ELEMENTS,
    Vec,
    constant,
    element_pointer,
    extern,
    f32x8,
    i8x16,
    i8x32,
    i16x16,
    i32x8,
    mask8,
    shuffle,
    spread,
)

_f16x8 = Vec("f16", 8)
_i16x32 = Vec("i16", 32)
Typed = tuple[Any, Callable[..., ir.Value]]

# ---------------------------------------------------------------------------------------------------------------------
# Memory


def _load(vec: Vec, finish: Callable[[ir.IRBuilder, ir.Value], ir.Value] = lambda _, v: v) -> Any:
    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source = element_pointer(context, builder, sig.args[0], *args)
        value = builder.load(builder.bitcast(source, vec.ir.as_pointer()))
        value.align = 1
        return finish(builder, value)

    return build


def _store(vec: Vec, p: Any, prepare: Callable[[ir.IRBuilder, ir.Value], ir.Value] = lambda _, v: v) -> Typed:
    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value = prepare(builder, args[2])
        target = element_pointer(context, builder, sig.args[0], args[0], args[1])
        builder.store(value, builder.bitcast(target, value.type.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(p, types.intp, vec), build


@intrinsic
def load_f32(typingctx: Any, p: Any, i: Any) -> Typed:
    """8 float32."""
    return f32x8(p, types.intp), _load(f32x8)


@intrinsic
def load_f16(typingctx: Any, p: Any, i: Any) -> Typed:
    """8 f16 (held as uint16) widened to float32, exactly."""
    if AVX2:
        return f32x8(p, types.intp), _load(_f16x8, lambda b, v: b.fpext(v, f32x8.ir))
    return f32x8(p, types.intp), _load(Vec("i16", 8), widened_f16)


@intrinsic
def load_i8x16(typingctx: Any, p: Any, i: Any) -> Typed:
    """16 bytes."""
    return i8x16(p, types.intp), _load(i8x16)


@intrinsic
def load_i8(typingctx: Any, p: Any, i: Any) -> Typed:
    """32 bytes."""
    return i8x32(p, types.intp), _load(i8x32)


@intrinsic
def load_two_rows(typingctx: Any, p: Any, q: Any, i: Any) -> Typed:
    """16 bytes at p[i] and 16 at q[i]: i8x32. With p and q the same, they come twice."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        halves = []
        for pointer, kind in zip(args[:2], sig.args[:2], strict=True):
            source = element_pointer(context, builder, kind, pointer, args[2])
            halves.append(builder.load(builder.bitcast(source, i8x16.ir.as_pointer())))
            halves[-1].align = 1
        return shuffle(builder, halves[0], halves[1], range(32))

    return i8x32(p, q, types.intp), build


@intrinsic
def load_4_bytes(typingctx: Any, p: Any, i: Any) -> Typed:
    """The 4 bytes at ``i``, eight times: i8x32."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source = element_pointer(context, builder, sig.args[0], *args)
        word = builder.load(builder.bitcast(source, I32.as_pointer()))
        word.align = 1
        return builder.bitcast(spread(builder, word, i32x8), i8x32.ir)

    return i8x32(p, types.intp), build


@intrinsic
def store_f32(typingctx: Any, p: Any, i: Any, v: Any) -> Typed:
    """8 float32."""
    return _store(f32x8, p)


@intrinsic
def store_f16(typingctx: Any, p: Any, i: Any, v: Any) -> Typed:
    """8 float32 rounded to f16 (nearest, ties to even), held as uint16."""
    if AVX2:
        return _store(f32x8, p, lambda b, v: b.fptrunc(v, _f16x8.ir))
    return _store(f32x8, p, narrowed_f16)


@intrinsic
def store_i8(typingctx: Any, p: Any, i: Any, v: Any) -> Typed:
    """32 bytes."""
    return _store(i8x32, p)


@intrinsic
def prefetch(typingctx: Any, p: Any, i: Any) -> Typed:
    """Asks for the cache line of element ``i``; any address will do."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        place = builder.bitcast(element_pointer(context, builder, sig.args[0], *args), IR_ELEMENTS["i8"].as_pointer())
        function = extern(builder, "llvm.prefetch.p0", ir.VoidType(), place.type, I32, I32, I32)
        builder.call(function, [place, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])
        return context.get_dummy_value()

    return types.void(p, types.intp), build


@intrinsic
def advance(typingctx: Any, p: Any, n: Any) -> Typed | None:
    """The pointer ``n`` elements further on."""
    if not isinstance(p, types.CPointer):
        return None

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return element_pointer(context, builder, sig.args[0], *args)

    return p(p, types.intp), build


def _cast(result: Any, p: Any) -> Typed:
    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], context.get_value_type(result))

    return result(p), build


@intrinsic
def as_f32(typingctx: Any, p: Any) -> Typed:
    """The same address as a pointer to float32."""
    return _cast(types.CPointer(types.float32), p)


@intrinsic
def as_f16(typingctx: Any, p: Any) -> Typed:
    """The same address as a pointer to f16 (uint16)."""
    return _cast(types.CPointer(types.uint16), p)


# ---------------------------------------------------------------------------------------------------------------------
# float32


@intrinsic
def spread_f32(typingctx: Any, x: Any) -> Typed:
    """``x`` in all 8 elements."""
    return f32x8(types.float32), lambda c, b, sig, args: spread(b, args[0], f32x8)


@intrinsic
def zero_f32(typingctx: Any) -> Typed:
    return f32x8(), lambda c, b, sig, args: constant(f32x8, 0.0)


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Typed:
    """x · y + z, rounded once."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.call(extern(builder, f"llvm.fma.v{x.n}f32", x.ir, *[x.ir] * 3), args)

    return x(x, x, x), build


@intrinsic
def minimum(typingctx: Any, x: Any, y: Any) -> Typed:
    """The smaller of each pair, of f32 vectors or a vector and a number; ``y`` where one is NaN."""
    return x(x, x), lambda c, b, sig, args: b.select(b.fcmp_ordered("<", *args), *args)


@intrinsic
def maximum(typingctx: Any, x: Any, y: Any) -> Typed:
    """The larger of each pair; ``y`` where one is NaN."""
    return f32x8(f32x8, f32x8), lambda c, b, sig, args: b.select(b.fcmp_ordered(">", *args), *args)


@intrinsic
def absolute(typingctx: Any, x: Any) -> Typed:
    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.call(extern(builder, "llvm.fabs.v8f32", f32x8.ir, f32x8.ir), args)

    return f32x8(f32x8), build


@intrinsic
def copysign(typingctx: Any, x: Any, y: Any) -> Typed:
    """The magnitude of ``x`` with the sign of ``y``."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.call(extern(builder, "llvm.copysign.v8f32", f32x8.ir, f32x8.ir, f32x8.ir), args)

    return f32x8(f32x8, f32x8), build


@intrinsic
def select(typingctx: Any, mask: Any, x: Any, y: Any) -> Typed:
    """``x`` where the mask is set, else ``y``; f32 vectors."""
    return f32x8(mask8, f32x8, f32x8), lambda c, b, sig, args: b.select(*args)


@intrinsic
def to_f32(typingctx: Any, x: Any) -> Typed:
    """int32 to float32."""
    result = Vec("f32", x.n)
    return result(x), lambda c, b, sig, args: b.sitofp(args[0], result.ir)


@intrinsic
def truncate(typingctx: Any, x: Any) -> Typed:
    """float32 to int32 towards zero; the values fit."""
    return i32x8(f32x8), lambda c, b, sig, args: b.fptosi(args[0], i32x8.ir)


@intrinsic
def bits_of(typingctx: Any, x: Any) -> Typed:
    """The bits of float32 as int32."""
    return i32x8(f32x8), lambda c, b, sig, args: b.bitcast(args[0], i32x8.ir)


@intrinsic
def from_bits(typingctx: Any, x: Any) -> Typed:
    """int32 as the bits of float32."""
    return f32x8(i32x8), lambda c, b, sig, args: b.bitcast(args[0], f32x8.ir)


@intrinsic
def sum_f32(typingctx: Any, x: Any) -> Typed:
    """((0+4)+(2+6)) + ((1+5)+(3+7))."""
    return types.float32(f32x8), lambda c, b, sig, args: folded(b, args[0], b.fadd)


@intrinsic
def max_f32(typingctx: Any, x: Any) -> Typed:
    """The largest element."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return folded(builder, args[0], lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))

    return types.float32(f32x8), build


@intrinsic
def largest_magnitude(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Typed:
    """The largest |x| of 32 values; infinity or NaN when one is, which their order as integers sees to."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        def larger(x: ir.Value, y: ir.Value) -> ir.Value:
            return builder.select(builder.icmp_signed(">", x, y), x, y)

        no_sign = constant(i32x8, 0x7FFFFFFF)
        sizes = [builder.and_(builder.bitcast(v, i32x8.ir), no_sign) for v in args]
        both = larger(larger(sizes[0], sizes[1]), larger(sizes[2], sizes[3]))
        return builder.bitcast(folded(builder, both, larger), IR_ELEMENTS["f32"])

    return types.float32(*[f32x8] * 4), build


@intrinsic
def lane_numbers(typingctx: Any) -> Typed:
    """0 to 7 as float32."""
    return f32x8(), lambda c, b, sig, args: constant(f32x8, [float(i) for i in range(8)])


@intrinsic
def sum_i32(typingctx: Any, x: Any) -> Typed:
    """The sum of 8 int32."""
    return types.int32(i32x8), lambda c, b, sig, args: folded(b, args[0], b.add)


@intrinsic
def transpose_f32(typingctx: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Typed:
    """8 vectors as the rows of a matrix, to the 8 columns: a tuple of vectors."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return context.make_tuple(builder, sig.return_type, transposed(builder, list(args)))

    return types.UniTuple(f32x8, 8)(*[f32x8] * 8), build


# ---------------------------------------------------------------------------------------------------------------------
# Integers


@intrinsic
def zero_i16(typingctx: Any) -> Typed:
    return i16x16(), lambda c, b, sig, args: constant(i16x16, 0)


@intrinsic
def spread_i16(typingctx: Any, x: Any) -> Typed:
    """``x`` in all 16 elements."""
    return i16x16(types.int16), lambda c, b, sig, args: spread(b, args[0], i16x16)


@intrinsic
def low_nibbles(typingctx: Any, v: Any) -> Typed:
    """The low 4 bits of each byte."""
    return v(v), lambda c, b, sig, args: b.and_(args[0], constant(v, 15))


@intrinsic
def high_nibbles(typingctx: Any, v: Any) -> Typed:
    """The high 4 bits of each byte, 0 to 15."""
    return v(v), lambda c, b, sig, args: b.lshr(args[0], constant(v, 4))


@intrinsic
def flip_high_bits(typingctx: Any, v: Any) -> Typed:
    """Each byte with its highest bit flipped: int8 v becomes v + 128, its high nibble h becomes h + 8."""
    return v(v), lambda c, b, sig, args: b.xor(args[0], constant(v, -128))


@intrinsic
def absolute_i8(typingctx: Any, v: Any) -> Typed:
    """Magnitudes of int8 (-128 stays)."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        zero = constant(i8x32, 0)
        return builder.select(builder.icmp_signed("<", args[0], zero), builder.sub(zero, args[0]), args[0])

    return i8x32(i8x32), build


@intrinsic
def with_sign_of(typingctx: Any, v: Any, s: Any) -> Typed:
    """int8 ``v`` times the sign (-1, 0, 1) of ``s``; v is not -128."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        v, s = args
        if AVX2:
            return builder.call(extern(builder, "llvm.x86.avx2.psign.b", i8x32.ir, i8x32.ir, i8x32.ir), args)
        zero = constant(i8x32, 0)
        signed = builder.select(builder.icmp_signed("<", s, zero), builder.sub(zero, v), v)
        return builder.select(builder.icmp_signed("==", s, zero), zero, signed)

    return i8x32(i8x32, i8x32), build


@intrinsic
def dot_pairs(typingctx: Any, u: Any, s: Any) -> Typed:
    """Unsigned bytes times signed bytes, neighbours added: i16x16. The sums fit 16 bits."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if AVX2:
            return builder.call(extern(builder, "llvm.x86.avx2.pmadd.ub.sw", i16x16.ir, i8x32.ir, i8x32.ir), args)
        products = builder.mul(builder.zext(args[0], _i16x32.ir), builder.sext(args[1], _i16x32.ir))
        return sum_of_neighbours(builder, products)

    return i16x16(i8x32, i8x32), build


@intrinsic
def dot_pairs_i16(typingctx: Any, x: Any, y: Any) -> Typed:
    """16-bit products, neighbours added: i32x8."""

    return i32x8(i16x16, i16x16), lambda c, b, sig, args: multiply_pairs_i16(b, *args)


@intrinsic
def in_place(typingctx: Any, v: Any) -> Typed:
    """``v`` itself, as int16. Keeps LLVM from reordering a running sum over this point, which would spill registers."""

    return i16x16(i16x16), lambda c, b, sig, args: pinned(b, args[0])


@intrinsic
def pack_i8(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Typed:
    """4 vectors of int32 in -128 to 127, in order, as 32 bytes."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        low, high = (shuffle(builder, x, y, range(16)) for x, y in (args[:2], args[2:]))
        return builder.trunc(shuffle(builder, low, high, range(32)), i8x32.ir)

    return i8x32(*[i32x8] * 4), build


@intrinsic
def sums_of_8_rows(typingctx: Any, a: Any, b: Any, c: Any, d: Any, start: Any) -> Typed:
    """The sums of 8 rows of 8 int16, each plus 2 · ``start``: i32x8.

    A vector's halves are two rows: a holds rows 0 and 4, b 1 and 5, c 2 and 6, d 3 and 7. Half a row's sum plus start,
    and every partial sum, fits 16 bits.
    """

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        (halves,) = folded_rows(builder, list(args[:4]), i16x16, (16, 32))
        halves = pinned(builder, builder.add(halves, args[4]))
        order = [k + i + s for k in (0, 8) for i in range(4) for s in (0, 4)]
        return multiply_pairs_i16(builder, shuffle(builder, halves, halves, order), constant(i16x16, 1))

    return i32x8(*[i16x16] * 5), build


@intrinsic
def row_sums_i32(typingctx: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Typed:
    """The sums of 8 vectors of 8 int32: i32x8."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        low, high = folded_rows(builder, list(args), i32x8, (32, 64))
        first = shuffle(builder, low, high, [*range(4), *range(8, 12)])
        second = shuffle(builder, low, high, [*range(4, 8), *range(12, 16)])
        return builder.add(first, second)

    return i32x8(*[i32x8] * 8), build


@intrinsic
def columns_of_16(typingctx: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Typed:
    """8 rows of 16 bytes to 4 vectors i8x32: vector k holds bytes 4k to 4k + 3 of row 0, of row 1, ..."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return context.make_tuple(builder, sig.return_type, columns_of_rows(builder, list(args), 4))

    return types.UniTuple(i8x32, 4)(*[i8x16] * 8), build


@intrinsic
def columns_of_32(typingctx: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Typed:
    """8 rows of 32 bytes to 8 vectors i8x32: vector k holds bytes 4k to 4k + 3 of row 0, of row 1, ..."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return context.make_tuple(builder, sig.return_type, columns_of_rows(builder, list(args), 8))

    return types.UniTuple(i8x32, 8)(*[i8x32] * 8), build
