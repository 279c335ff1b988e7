"""The cache of compiled kernels: trusted only when whole and the user's own, keyed by what the code depends on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.kernels import native
from krafla_cli.kernels import operations as ops
from krafla_cli.kernels.native import Native, prepare
from krafla_cli.kernels.structs import struct
from krafla_cli.progress import Progress

KERNEL = ops.NORM_ADD
CODE = b"object code"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.cache_folder.cache_clear()
    yield tmp_path
    native.cache_folder.cache_clear()


def test_stored_code_comes_back_and_belongs_to_the_user(empty_cache: Path) -> None:
    assert native._read_cached(KERNEL) is None
    native._write_cached(KERNEL, CODE)
    assert native._read_cached(KERNEL) == CODE
    assert KERNEL.cache_file.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in KERNEL.cache_file.parent.iterdir()] == ["norms.norm_add.o"]


def test_broken_or_foreign_code_is_not_used(empty_cache: Path) -> None:
    native._write_cached(KERNEL, CODE)
    whole = KERNEL.cache_file.read_bytes()
    for data in (whole[:-1], whole[:-1] + b"!", b"", whole[:10]):
        KERNEL.cache_file.write_bytes(data)
        assert native._read_cached(KERNEL) is None
    KERNEL.cache_file.write_bytes(whole)
    KERNEL.cache_file.chmod(0o666)
    assert native._read_cached(KERNEL) is None


def test_a_folder_that_cannot_be_written_does_not_matter(empty_cache: Path) -> None:
    (empty_cache / "mlb").write_text("a file where the folder should be")
    native._write_cached(KERNEL, CODE)
    assert native._read_cached(KERNEL) is None


def test_the_key_tells_sources_and_lowerings_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def key() -> str:
        native._cache_key.cache_clear()
        return native._cache_key()

    monkeypatch.delenv("MLB_SIMD", raising=False)
    (tmp_path / "native.py").write_text("one")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    keys = [key()]
    (tmp_path / "native.py").write_text("two")
    keys.append(key())
    for lowering in ("generic", "avx2"):
        monkeypatch.setenv("MLB_SIMD", lowering)
        keys.append(key())
    monkeypatch.setattr(native, "version", lambda name: "0.0")
    keys.append(key())
    native._cache_key.cache_clear()
    assert len(set(keys)) == 5


def test_compiled_once_then_loaded_without_numba(empty_cache: Path) -> None:
    """In a process of its own: compiled, stored, and in the next one loaded."""
    code = (
        "import sys; from krafla_cli.kernels import operations as ops; from krafla_cli.kernels.native import prepare; "
        "prepare([ops.NORM_ADD]); assert ops.NORM_ADD.address; print('numba' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert outputs == ["True\n", "False\n"]


def test_prepare_reports_what_it_compiles(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    class Recorder(Progress):
        def __init__(self) -> None:
            self.events: list[tuple] = []

        def start(self, what: str, total: int, unit: str) -> None:
            self.events.append(("start", total))

        def advance(self, n: int) -> None:
            self.events.append(("advance", n))

        def finish(self) -> None:
            self.events.append(("finish",))

    monkeypatch.setattr(native, "_load", lambda _: 0)
    recorder = Recorder()
    prepare([ops.NORM_ADD, ops.SOFT_CAP], recorder)
    assert recorder.events == [("start", 2), ("advance", 1), ("advance", 1), ("finish",)]
    native._write_cached(ops.NORM_ADD, CODE)
    native._write_cached(ops.SOFT_CAP, CODE)
    recorder.events.clear()
    prepare([ops.NORM_ADD, ops.SOFT_CAP], recorder)
    assert recorder.events == []


def test_structs() -> None:
    layout = struct("S", p="f32*", n="i64", x="f64")
    array = np.zeros(3, np.float32)
    words = layout.pack(x=0.5, p=array)
    assert words.tolist() == [array.ctypes.data, 0, np.float64(0.5).view(np.int64)]
    assert layout.index("x") == 2
    with pytest.raises(ValueError, match="S has no field m, q"):
        layout.pack(q=1, m=2, n=3)


def test_a_kernel_that_does_not_exist() -> None:
    with pytest.raises(AttributeError):
        _ = Native("norms", "no_such_kernel", ()).address
