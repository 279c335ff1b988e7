"""How kernels call each other: as functions that the compiler puts in place of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def inline(function: F) -> F:
    """``function`` for use in kernels; numba finds its types from each call."""
    compiled: F = numba.njit(error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        function
    )
    return compiled
