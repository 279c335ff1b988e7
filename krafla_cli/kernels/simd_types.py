"""Values of LLVM vector type inside numba kernels, typed pointers, and structs of :mod:`~krafla_cli.kernels.structs`.

A :class:`Vec` is a numba type whose data model is an LLVM vector, so that numba keeps it in a register. Vectors of one
type add, subtract, multiply, divide, and combine by & | ^ << >>; a number on either side of a vector is spread over its
elements. Comparisons give masks. The operations are in :mod:`~krafla_cli.kernels.simd`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import lower_builtin, models, register_model
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature

from krafla_cli.kernels.structs import Struct

# What kernels see of these types for a reader and a type checker: numba finds the types by itself.
F32x8: TypeAlias = Any
F32x16: TypeAlias = Any
I32x8: TypeAlias = Any
I32x16: TypeAlias = Any
I16x16: TypeAlias = Any
I8x32: TypeAlias = Any
I8x64: TypeAlias = Any
I8x16: TypeAlias = Any
Mask: TypeAlias = Any
Pointer: TypeAlias = Any
Operands: TypeAlias = Any

IR_ELEMENTS = {
    "i1": ir.IntType(1),
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
}
I32 = IR_ELEMENTS["i32"]


class Vec(types.Type):  # type: ignore[misc]
    """A vector of ``n`` elements of type ``element`` ("f32", "i8", ...)."""

    def __init__(self, element: str, n: int) -> None:
        self.element, self.n = element, n
        super().__init__(name=f"Vec({element}x{n})")

    @property
    def ir(self) -> ir.VectorType:
        return ir.VectorType(IR_ELEMENTS[self.element], self.n)

    @property
    def is_float(self) -> bool:
        return self.element in ("f32", "f64")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vec: Vec) -> None:
        super().__init__(manager, vec, vec.ir)


f32x8 = Vec("f32", 8)
f32x16 = Vec("f32", 16)
i32x8 = Vec("i32", 8)
i16x16 = Vec("i16", 16)
i8x16 = Vec("i8", 16)
i8x32 = Vec("i8", 32)
mask8 = Vec("i1", 8)


def constant(vec: Vec, values: Any) -> ir.Constant:
    """A vector constant: one value for all elements, or a list."""
    return ir.Constant(vec.ir, list(values) if isinstance(values, (list, tuple, range)) else [values] * vec.n)


def shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, order: Any) -> ir.Value:
    """The elements of a and b (b's count on from a's) picked in ``order``."""
    order = list(order)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))


def spread(builder: ir.IRBuilder, scalar: ir.Value, vec: Vec) -> ir.Value:
    """A vector with ``scalar`` in every element."""
    one = builder.insert_element(ir.Constant(vec.ir, ir.Undefined), scalar, ir.Constant(I32, 0))
    return shuffle(builder, one, one, [0] * vec.n)


# ---------------------------------------------------------------------------------------------------------------------
# Operators

_FLOAT_OPS = {operator.add: "fadd", operator.sub: "fsub", operator.mul: "fmul", operator.truediv: "fdiv"}
_INT_OPS = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.and_: "and_",
    operator.or_: "or_",
    operator.xor: "xor",
    operator.lshift: "shl",
    operator.rshift: "ashr",
}
_NUMBERS = {"f32": types.float32, "f64": types.float64, "i8": types.int8, "i16": types.int16, "i32": types.int32}
_COMPARISONS = {operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "=="}


def _operand_type(a: Any, b: Any) -> Vec | None:
    """The vector type that ``a op b`` is computed in, if one of them is a vector and the other fits."""
    vec = a if isinstance(a, Vec) else b
    other = b if vec is a else a
    if isinstance(vec, Vec) and (other == vec or isinstance(other, types.Number)):
        return vec
    return None


def _operands(context: Any, builder: ir.IRBuilder, vec: Vec, sig: Any, args: Any) -> list[ir.Value]:
    """The two arguments as vectors; a number is converted to the element type and spread."""
    return [
        arg if isinstance(t, Vec) else spread(builder, context.cast(builder, arg, t, _NUMBERS[vec.element]), vec)
        for t, arg in zip(sig.args, args, strict=True)
    ]


def _define_operator(op: Callable[..., Any], result: Callable[[Vec], Vec], build: Callable[..., ir.Value]) -> None:
    """Teaches numba ``op`` on vectors: its type by ``result``, its code by ``build(builder, vec, a, b)``."""

    class _Typing(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            vec = _operand_type(*args) if len(args) == 2 else None
            return None if vec is None else signature(result(vec), *args)

    infer_global(op)(_Typing)

    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        vec = _operand_type(*sig.args)
        return build(builder, vec, *_operands(context, builder, vec, sig, args))  # type: ignore[arg-type]

    for pair in ((Vec, Vec), (Vec, types.Number), (types.Number, Vec)):
        lower_builtin(op, *pair)(lower)


def _arithmetic(op: Callable[..., Any]) -> Callable[..., ir.Value]:
    def build(builder: ir.IRBuilder, vec: Vec, a: ir.Value, b: ir.Value) -> ir.Value:
        return getattr(builder, (_FLOAT_OPS if vec.is_float else _INT_OPS)[op])(a, b)

    return build


def _comparison(op: Callable[..., Any]) -> Callable[..., ir.Value]:
    def build(builder: ir.IRBuilder, vec: Vec, a: ir.Value, b: ir.Value) -> ir.Value:
        compare = builder.fcmp_ordered if vec.is_float else builder.icmp_signed
        return compare(_COMPARISONS[op], a, b)

    return build


for _op in {**_FLOAT_OPS, **_INT_OPS}:
    _define_operator(_op, lambda vec: vec, _arithmetic(_op))
for _op in _COMPARISONS:
    _define_operator(_op, lambda vec: Vec("i1", vec.n), _comparison(_op))


# ---------------------------------------------------------------------------------------------------------------------
# Pointers and structs

_POINTEES = {
    "f64": types.float64,
    "f32": types.float32,
    "f16": types.uint16,
    "i8": types.int8,
    "u8": types.uint8,
    "i16": types.int16,
    "i32": types.int32,
    "i64": types.int64,
}


def numba_type(code: str) -> Any:
    """The numba type of a field's or argument's type code; f16 values are held as their uint16 bits."""
    if code.endswith("*"):
        return types.CPointer(_POINTEES[code[:-1]])
    return {"i64": types.int64, "f64": types.float64}[code]


class StructPointer(types.Type):  # type: ignore[misc]
    """A pointer to a struct of the given layout; ``a.name`` reads a field."""

    def __init__(self, layout: Struct) -> None:
        self.layout = layout
        super().__init__(name=f"StructPointer({layout.name},{layout.fields})")


@register_model(StructPointer)
class _StructPointerModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, pointer: StructPointer) -> None:
        super().__init__(manager, pointer, IR_ELEMENTS["i64"].as_pointer())


@infer_getattr
class _StructAttributes(AttributeTemplate):  # type: ignore[misc]
    key = StructPointer

    def generic_resolve(self, pointer: StructPointer, attr: str) -> Any:
        code = dict(pointer.layout.fields).get(attr)
        return None if code is None else numba_type(code)


@lower_getattr_generic(StructPointer)
def _read_field(context: Any, builder: ir.IRBuilder, pointer: StructPointer, value: ir.Value, attr: str) -> ir.Value:
    code = dict(pointer.layout.fields)[attr]
    index = ir.Constant(IR_ELEMENTS["i64"], pointer.layout.index(attr))
    word = builder.load(builder.gep(value, [index]))
    if code == "i64":
        return word
    target = context.get_value_type(numba_type(code))
    return builder.bitcast(word, target) if code == "f64" else builder.inttoptr(word, target)


def element_pointer(context: Any, builder: ir.IRBuilder, kind: Any, base: ir.Value, index: ir.Value) -> ir.Value:
    """The address of element ``index`` of ``base``, a pointer or a C-contiguous array of numba type ``kind``."""
    if isinstance(kind, types.Array):
        base = context.make_array(kind)(context, builder, base).data
    return builder.gep(base, [index])


def extern(builder: ir.IRBuilder, name: str, result: ir.Type, *params: ir.Type) -> ir.Function:
    """The external function or LLVM intrinsic ``name``, declared in the present module."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, list(params)), name)
