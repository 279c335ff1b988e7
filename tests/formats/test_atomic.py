"""Output is complete or absent: full disks, read-only folders, limits, links, leftovers, two writers at once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from krafla_cli.errors import FileError
from krafla_cli.formats.atomic import Output, atomic_output, commit, write_bytes


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_written_whole(tmp_path: Path) -> None:
    with atomic_output(tmp_path / "x") as f:
        f.write(b"ab")
        assert len(names(tmp_path)) == 1
        assert "x" not in names(tmp_path)
        f.write(b"c")
    assert (tmp_path / "x").read_bytes() == b"abc"
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(error), atomic_output(tmp_path / "x", force=True) as f:
        f.write(b"new")
        raise error
    assert (tmp_path / "x").read_bytes() == b"old"
    assert names(tmp_path) == ["x"]


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    (tmp_path / "link").symlink_to("x")
    os.link(tmp_path / "x", tmp_path / "hard")
    for target, force, text in [
        ("x", False, "exists already; --force overwrites it"),
        ("x", True, "it is the input itself; give another name"),
        ("link", True, "it is the input itself"),
        ("hard", True, "it is the input itself"),
        (".", True, "it is a folder; give a file name"),
        ("none/x", True, f"the folder {tmp_path}/none does not exist"),
    ]:
        with pytest.raises(FileError) as raised:
            write_bytes(tmp_path / target, b"new", force, inputs=(tmp_path / "x",) if force else ())
        assert text in str(raised.value)
    assert (tmp_path / "x").read_bytes() == b"old"


def test_devices_are_not_replaced() -> None:
    for device in ("/dev/full", "/dev/null"):
        with pytest.raises(FileError, match="it is a device or a pipe"):
            write_bytes(device, b"x", force=True)


def test_a_link_keeps_pointing(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_bytes(tmp_path / "link", b"new", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_modes(tmp_path: Path) -> None:
    write_bytes(tmp_path / "x", b"1")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~umask
    (tmp_path / "x").chmod(0o640)
    write_bytes(tmp_path / "x", b"2", force=True)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_long_and_strange_names(tmp_path: Path) -> None:
    name = "é" * 127
    write_bytes(tmp_path / name, b"1")
    assert (tmp_path / name).read_bytes() == b"1"


def child(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)


def test_a_size_limit_in_the_middle(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from krafla_cli.formats.atomic import atomic_output\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))\n"
        "with atomic_output(sys.argv[1]) as f:\n"
        "    for _ in range(8): f.write(bytes(1 << 20))\n"
    )
    result = child(code, str(tmp_path / "x"))
    assert f"cannot write {tmp_path}/x: File too large" in result.stderr
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from krafla_cli.formats.atomic import atomic_output\n"
        "with atomic_output(sys.argv[1]) as f:\n"
        "    f.write(b'half'); f.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child(code, str(tmp_path / "x"))
    child(code, str(tmp_path / "y"))
    assert len(names(tmp_path)) == 2
    write_bytes(tmp_path / "x", b"whole")
    assert "x" in names(tmp_path)
    assert len(names(tmp_path)) == 2  # x, and what was left of y, which is not ours to judge
    write_bytes(tmp_path / "y", b"whole")
    assert names(tmp_path) == ["x", "y"]


def test_two_writers_of_one_target(tmp_path: Path) -> None:
    one, other = Output(tmp_path / "x"), Output(tmp_path / "x")
    one.file.write(b"one")
    other.file.write(b"other")
    commit([other], force=False)
    assert (tmp_path / "x").read_bytes() == b"other"
    with pytest.raises(FileError, match="exists already; --force overwrites it"):
        commit([one], force=False)
    assert (tmp_path / "x").read_bytes() == b"other"
    commit([one], force=True)
    assert (tmp_path / "x").read_bytes() == b"one"
    assert names(tmp_path) == ["x"]
