"""Runs a command again and again, each time ended without warning at its next call that changes the disk.

    python -m tests.helpers.kill_points [--resume | --signal=SIGINT] FOLDER ARGS...

Imports once, then forks a child for every k = 1, 2, ...: the child counts writes, fsyncs and renames and ends itself
at the k-th, or with --signal sends itself that signal. After each, ``FOLDER`` must hold each target old or new, whole;
the last child gets to its end. After a signal nothing may be left of what the child began. Prints one JSON document:
how many points there were, and what was wrong. With --resume the command is a job of shards in FOLDER: after each kill
every shard must be whole, and a second run must leave what one without a kill leaves.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from krafla_cli.__main__ import main as mlb

# What the commands import when they run; each child would pay for it anew.
IMPORTS = (
    "krafla_cli.convert.pipeline", "krafla_cli.embed.pack", "krafla_cli.export.gguf", "krafla_cli.export.safetensors",
    "krafla_cli.export.mllm", "krafla_cli.kernels.quantize_rows", "krafla_cli.runtime.imatrix",
    "krafla_cli.tokenizer.convert", "gguf", "jinja2", "safetensors.numpy", "tqdm",
)  # fmt: skip
KILLED = 77
MOST_POINTS = 300


class Killer:
    """Ends the process at the ``k``-th call that changes the disk, or sends it ``signum`` there."""

    def __init__(self, k: int, signum: int | None) -> None:
        self.left = k
        self._signum = signum

    def hit(self) -> None:
        self.left -= 1
        if self.left == 0:
            if self._signum is None:
                os._exit(KILLED)
            signal.raise_signal(self._signum)

    def install(self) -> None:
        """Puts itself before os.fsync, os.replace, and the writes to temporary files, by whatever they are opened."""
        fsync, replace, fdopen, opened = os.fsync, os.replace, os.fdopen, builtins.open

        def counted(call: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                self.hit()
                return call(*args, **kwargs)

            return wrapped

        os.fsync, os.replace = counted(fsync), counted(replace)
        os.fdopen = lambda *args, **kwargs: CountedFile(fdopen(*args, **kwargs), self)  # type: ignore[assignment]

        def open_counted(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = opened(path, mode, *args, **kwargs)
            return CountedFile(file, self) if "w" in mode and ".mlb-tmp-" in str(path) else file

        builtins.open = open_counted  # type: ignore[assignment]


class CountedFile:
    """A file whose writes are counted, and reach the disk half when the process ends in them."""

    def __init__(self, file: Any, killer: Killer) -> None:
        self._file = file
        self._killer = killer

    def write(self, data: Any) -> Any:
        view = memoryview(data)
        if self._killer.left == 1:
            self._file.write(bytes(view)[: view.nbytes // 2])
            self._file.flush()
        self._killer.hit()
        return self._file.write(data)

    def fileno(self) -> int:
        """The descriptor, through which NumPy's tofile writes."""
        self._killer.hit()
        return int(self._file.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def child(args: list[str], k: int, signum: int | None) -> NoReturn:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - ends with the process
    Killer(k, signum).install()
    sys.argv = ["mlb", *args]
    try:
        mlb()
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    os._exit(1)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not p.name.startswith(".mlb-tmp-")
    }


def run_child(args: list[str], k: int, signum: int | None = None) -> int:
    """The exit code of the command, ended at point ``k``, or sent ``signum`` there."""
    pid = os.fork()
    if pid == 0:
        child(args, k, signum)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def resume(folder: Path, args: list[str]) -> None:
    importlib.import_module("krafla_cli.embed.shards")  # once, not in every child
    run_child(args, sys.maxsize)
    new = snapshot(folder)
    wrong: list[str] = []
    for k in range(1, MOST_POINTS):
        shutil.rmtree(folder)
        status = run_child(args, k)
        torn = [name for name, data in snapshot(folder).items() if name.startswith("part-") and data != new[name]]
        wrong += [f"kill point {k}: {name} is not whole" for name in torn]
        if status != KILLED:
            break
        if run_child(args, sys.maxsize) != 0 or {p.name: p.read_bytes() for p in folder.iterdir()} != new:
            wrong.append(f"kill point {k}: the second run left something else")
    print(json.dumps({"points": k - 1, "wrong": wrong, "files": sorted(new)}))


def old_or_new(folder: Path, args: list[str], signum: int | None) -> None:
    stopped = KILLED if signum is None else 128 + signum
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    for name in IMPORTS:
        importlib.import_module(name)
    old = snapshot(folder)
    wrong: list[str] = []
    seen: list[dict[str, bytes]] = []
    for k in range(1, MOST_POINTS):
        status = run_child(args, k, signum)
        seen.append(snapshot(folder))
        if status != stopped:
            if status != 0:
                wrong.append(f"at point {k} the command ended with {status}")
            break
        if signum is not None:
            wrong += [f"signal at point {k} leaves {name}" for name in leftovers(folder)]
        restore(folder, old)
    new = seen[-1]
    for k, after in enumerate(seen, 1):
        for name, data in after.items():
            if data not in (old.get(name), new.get(name)):
                wrong.append(f"kill point {k}: {name} is neither old nor new")
    wrong += [f"left behind: {name}" for name in leftovers(folder)]
    print(json.dumps({"points": len(seen) - 1, "wrong": wrong, "files": sorted(new)}))


def leftovers(folder: Path) -> list[str]:
    """What a process left under temporary names."""
    return [p.name for p in folder.rglob(".mlb-tmp-*")]


def restore(folder: Path, old: dict[str, bytes]) -> None:
    """Puts the old files back; what the killed child left under temporary names stays, for the next one to remove."""
    for name in snapshot(folder):
        if name not in old:
            (folder / name).unlink()
    for name, data in old.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    option, *rest = sys.argv[1:]
    if option == "--resume":
        resume(Path(rest[0]), rest[1:])
    elif option.startswith("--signal="):
        old_or_new(Path(rest[0]), rest[1:], signal.Signals[option.partition("=")[2]])
    else:
        old_or_new(Path(option), rest, None)
