"""Kernels as native functions: compiled by numba once, kept as object code in a cache folder, loaded without numba.

A :class:`Native` names a plain Python function of a kernel module and the types of its parameters. Its machine code is
compiled when it is first asked for, and stored in the user's cache folder under a key made of everything that it
depends on: the kernels' sources, the versions of numba and llvmlite, the CPU and its features, and the lowering. Later
processes load the object code through LLVM in milliseconds and never import numba. Calls go through ctypes, which lets
other Python threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import llvmlite.binding as llvm
import numpy as np

from krafla_cli.kernels.structs import Struct, address
from krafla_cli.progress import SILENT, Progress

Param: TypeAlias = "Struct | str"  # a struct, or a type code of structs.py
_CTYPES = {"i64": ctypes.c_int64, "f64": ctypes.c_double}
_DIGEST_BYTES = hashlib.sha256().digest_size
_SYMBOL = "mlb_kernel_{}"
_RESULT = ctypes.create_string_buffer(16)  # where numba's convention has a function store its (empty) result
_lock = threading.RLock()
_not_kept: list[str] = []  # why object code could not be stored


@dataclass(frozen=True)
class Native:
    """The function ``name`` of module ``krafla_cli.kernels.<module>``; its parameters are structs, pointers, numbers.

    Calling it gives arrays as their addresses. It returns nothing and must not raise: numba's calling convention
    (status, result pointer and exception pointer first) is used as it is, and a status is a defect.
    """

    module: str
    name: str
    params: tuple[Param, ...]

    @property
    def address(self) -> int:
        """Where its machine code is; compiles or loads it first where needed."""
        return _load(self)

    def __call__(self, *args: Any) -> None:
        self.function(_RESULT, _RESULT, *(address(a) if isinstance(a, np.ndarray) else a for a in args))

    @cached_property
    def function(self) -> Any:
        """Its ctypes function: numba's two pointers, then the parameters, arrays and structs as addresses."""
        params: list[Any] = [
            _CTYPES.get(p, ctypes.c_void_p) if isinstance(p, str) else ctypes.c_void_p for p in self.params
        ]
        return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *params)(self.address)

    @property
    def cache_file(self) -> Path:
        return cache_folder() / f"{self.module}.{self.name}.o"


def prepare(natives: Sequence[Native], progress: Progress = SILENT) -> None:
    """Makes all of ``natives`` ready to run, with a bar over those that have to be compiled."""
    missing = [n for n in natives if not n.cache_file.is_file()]
    if missing:
        progress.start("compiling kernels for this CPU (once)", len(missing), "kernel")
    for native in natives:
        _load(native)
        if native in missing:
            progress.advance(1)
    if missing:
        progress.finish()
    if _not_kept:
        progress.warn(f"compiled kernels cannot be kept, and each run compiles them anew: {_not_kept[0]}")
        _not_kept.clear()


# ---------------------------------------------------------------------------------------------------------------------
# The cache


@cache
def cache_folder() -> Path:
    """The folder of this version of the kernels on this CPU, below $XDG_CACHE_HOME or ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not base.is_absolute():  # a relative one is to be ignored, says the XDG base directory specification
        home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
        base = Path(home if home.startswith("/") else os.devnull) / ".cache"
    return base / "mlb" / f"kernels-{_cache_key()}"


@cache
def _cache_key() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    features = llvm.get_host_cpu_features().flatten()
    facts = (version("numba"), version("llvmlite"), sys.platform, llvm.get_host_cpu_name(), features)
    digest.update("\0".join((*facts, os.environ.get("MLB_SIMD", ""))).encode())
    return digest.hexdigest()[:16]


def _read_cached(native: Native) -> bytes | None:
    """The object code of an earlier process, or None. Only a file of this user that others cannot write is trusted."""
    try:
        with native.cache_file.open("rb") as f:
            status = os.fstat(f.fileno())
            if hasattr(os, "getuid") and (
                status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            ):
                return None
            data = f.read()
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write_cached(native: Native, code: bytes) -> None:
    """Stores object code for later processes; where that fails (no space, a read-only home) they compile again."""
    path, temp = native.cache_file, ""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temp = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(fd, "wb") as f:
            f.write(hashlib.sha256(code).digest() + code)
        Path(temp).replace(path)
    except OSError as error:
        _not_kept.append(f"{path.parent}: {error.strerror}")
        if temp:
            Path(temp).unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Compiling and loading


def _compile(native: Native) -> bytes:
    """Object code with the one global symbol of ``native``."""
    module = _llvm_module(native)
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(_machine(), tuning)
    builder.getModulePassManager().run(module, builder)
    return bytes(_machine().emit_object(module))


def _llvm_module(native: Native) -> Any:
    """What numba makes of ``native`` and all that it calls, with the function under its symbol's name.

    numba would optimize each inlined helper alone, then all together; here LLVM does it once, in half the time.
    """
    import numba
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    from krafla_cli.kernels.simd_types import StructPointer, numba_type

    function = getattr(importlib.import_module(f"krafla_cli.kernels.{native.module}"), native.name)
    types = tuple(StructPointer(p) if isinstance(p, Struct) else numba_type(p) for p in native.params)
    dispatcher = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    cpu_target.target_context  # noqa: B018 (made with the usual level, for other users of numba)
    with global_compiler_lock:
        usual = numba.config.OPT
        numba.config.OPT = type(usual)(0)
        try:
            dispatcher.compile(numba.void(*types))
        finally:
            numba.config.OPT = usual
    result = dispatcher.overloads[types]
    module = llvm.parse_assembly(result.library.get_llvm_str())
    module.get_function(result.fndesc.llvm_func_name).name = _SYMBOL.format(native.name)
    return module


@cache
def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )


@cache
def _engine() -> Any:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())


_addresses: dict[Native, int] = {}


def _load(native: Native) -> int:
    with _lock:
        if native not in _addresses:
            code = _read_cached(native)
            if code is None:
                code = _compile(native)
                _write_cached(native, code)
            _engine().add_object_file(llvm.ObjectFileRef.from_data(code))
            _engine().finalize_object()
            _addresses[native] = _engine().get_function_address(_SYMBOL.format(native.name))
        return _addresses[native]
