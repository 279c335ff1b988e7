"""What a team of threads needs inside kernels: atomic counters, a barrier, and calls through addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from krafla_cli.kernels.features import FEATURES
from krafla_cli.kernels.inline import inline
from krafla_cli.kernels.simd_types import I32, IR_ELEMENTS, Operands, Pointer, element_pointer, extern
from krafla_cli.kernels.team import MEMBER

_I64 = IR_ELEMENTS["i64"]
_COUNTER = MEMBER.index("counter")
_SPINS_BEFORE_YIELD = 2000
# Names of the call that offers the processor to another thread.
_YIELD = next((name for name in ("sched_yield", "SwitchToThread") if llvm.address_of_symbol(name)), None)
Typed = tuple[Any, Callable[..., ir.Value]]


@intrinsic
def atomic_add(typingctx: Any, p: Any, i: Any, n: Any) -> Typed:
    """Adds ``n`` to the int64 p[i] at once for all threads; returns what it was."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        place = element_pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.atomic_rmw("add", place, args[2], "seq_cst")

    return types.int64(p, types.intp, types.int64), build


@intrinsic
def atomic_load(typingctx: Any, p: Any, i: Any) -> Typed:
    """The int64 p[i], and everything that other threads wrote before they changed it."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.load_atomic(element_pointer(context, builder, sig.args[0], *args), "acquire", 8)

    return types.int64(p, types.intp), build


@intrinsic
def pause(typingctx: Any) -> Typed:
    """Tells the processor that this is a waiting loop, where it can be told."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if FEATURES.get("sse2"):
            builder.call(extern(builder, "llvm.x86.sse2.pause", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def yield_processor(typingctx: Any) -> Typed:
    """Offers the processor to another thread."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if _YIELD is not None:
            builder.call(extern(builder, _YIELD, I32), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def call_operation(typingctx: Any, function: Any, operands: Any, step: Any, member: Any) -> Typed:
    """Calls the native function at address ``function`` with three structs, by numba's convention."""

    def build(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        pointer = IR_ELEMENTS["i8"].as_pointer()
        kind = ir.FunctionType(I32, [pointer] * 5)
        function = builder.inttoptr(args[0], kind.as_pointer())
        result = builder.bitcast(
            cgutils.alloca_once(builder, pointer), pointer
        )  # an empty result is stored, and ignored
        operands, step = (builder.inttoptr(a, pointer) for a in args[1:3])
        builder.call(function, [result, result, operands, step, builder.bitcast(args[3], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, member), build


@inline
def next_unit(me: Operands, n: int) -> int:
    """Takes the next ``n`` units of the present operation's work for this thread; returns the first."""
    return int(atomic_add(me.counter, 0, n))


@inline
def wait_for_all(arrived: Pointer, n_threads: int) -> None:
    """Returns when all threads of the team have called it equally often. ``arrived`` counts the calls of all."""
    place = atomic_add(arrived, 0, 1)
    target = (place // n_threads + 1) * n_threads
    spins = 0
    while atomic_load(arrived, 0) < target:
        spins += 1
        if spins < _SPINS_BEFORE_YIELD:
            pause()
        else:
            yield_processor()


def run_program(
    program: Pointer, first: int, last: int, step: int, member: Pointer, counters: int, arrived: Pointer, n_threads: int
) -> None:
    """Runs operations ``first`` to ``last`` as one thread of a team; see :mod:`~krafla_cli.kernels.team`."""
    for i in range(first, last):
        member[_COUNTER] = counters + 8 * i
        call_operation(program[3 * i], program[3 * i + 1], step, member)
        if program[3 * i + 2]:
            wait_for_all(arrived, n_threads)
    wait_for_all(arrived, n_threads)
