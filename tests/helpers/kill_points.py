"""Runs a command again and again, each time ended without warning at its next call that changes the disk.

    python -m tests.helpers.kill_points [--resume] FOLDER ARGS...

Imports once, then forks a child for every k = 1, 2, ...: the child counts writes, fsyncs and renames and ends itself
at the k-th. After each, ``FOLDER`` must hold each target old or new, whole; the last child gets to its end. Prints one
JSON document: how many kill points there were, and what was wrong. With --resume the command is a job of shards in
FOLDER: after each kill every shard must be whole, and a second run must leave what one without a kill leaves.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

from krafla_cli.cli import invoke as run

KILLED = 77
MOST_POINTS = 200


class Killer:
    """Ends the process at the ``k``-th call that changes the disk."""

    def __init__(self, k: int) -> None:
        self.left = k

    def hit(self) -> None:
        self.left -= 1
        if self.left == 0:
            os._exit(KILLED)

    def install(self) -> None:
        """Puts itself before os.fsync, os.replace, and the writes of files that are opened from a descriptor."""
        fsync, replace, fdopen = os.fsync, os.replace, os.fdopen

        def counted(call: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                self.hit()
                return call(*args, **kwargs)

            return wrapped

        os.fsync, os.replace = counted(fsync), counted(replace)
        os.fdopen = lambda *args, **kwargs: CountedFile(fdopen(*args, **kwargs), self)  # type: ignore[assignment]


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def child(args: list[str], k: int) -> NoReturn:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - ends with the process
    Killer(k).install()
    os._exit(run(args))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith(".mlb-tmp-")
    }


def run_child(args: list[str], k: int) -> int:
    """The exit code of the command, ended at point ``k``."""
    pid = os.fork()
    if pid == 0:
        child(args, k)
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


def old_or_new(folder: Path, args: list[str]) -> None:
    old = snapshot(folder)
    wrong: list[str] = []
    seen: list[dict[str, bytes]] = []
    for k in range(1, MOST_POINTS):
        status = run_child(args, k)
        seen.append(snapshot(folder))
        if status != KILLED:
            if status != 0:
                wrong.append(f"without a kill the command ended with {status}")
            break
        restore(folder, old)
    new = seen[-1]
    for k, after in enumerate(seen, 1):
        for name, data in after.items():
            if data not in (old.get(name), new.get(name)):
                wrong.append(f"kill point {k}: {name} is neither old nor new")
    left = [p.name for p in folder.iterdir() if p.name.startswith(".mlb-tmp-")]
    wrong += [f"left behind: {name}" for name in left]
    print(json.dumps({"points": len(seen) - 1, "wrong": wrong, "files": sorted(new)}))


def restore(folder: Path, old: dict[str, bytes]) -> None:
    """Puts the old files back; what the killed child left under temporary names stays, for the next one to remove."""
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith(".mlb-tmp-") and path.name not in old:
            path.unlink()
    for name, data in old.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    if sys.argv[1] == "--resume":
        resume(Path(sys.argv[2]), sys.argv[3:])
    else:
        old_or_new(Path(sys.argv[1]), sys.argv[2:])
