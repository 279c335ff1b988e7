"""Output files that are complete or absent: written beside their target under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from krafla_cli.errors import FileError, os_reason
from krafla_cli.formats.text import printable

_TEMP_PREFIX = ".mlb-tmp-"


def check_target(target: Path, force: bool = False, inputs: tuple[Path, ...] = ()) -> None:
    """Refuses a target that exists (without ``force``), is one of ``inputs``, or whose folder is missing.

    Called before any work, so that a long conversion does not end in a refusal. Raises FileError.
    """
    name = printable(str(target))
    if target.is_dir():
        raise FileError(f"cannot write {name}: it is a folder; give a file name")
    if not target.parent.is_dir():
        raise FileError(f"cannot write {name}: the folder {printable(str(target.parent))} does not exist")
    if not os.access(target.parent, os.W_OK):
        raise FileError(f"cannot write {name}: no permission to write into its folder")
    if not target.exists():
        return
    if not target.is_file():
        raise FileError(f"cannot write {name}: it is a device or a pipe, and the output is renamed into place")
    if any(source.exists() and source.samefile(target) for source in inputs):
        raise FileError(f"cannot write {name}: it is the input itself; give another name")
    if not force:
        raise _exists(target)


def _exists(target: Path) -> FileError:
    return FileError(f"{printable(str(target))} exists already; --force overwrites it")


class Output:
    """A temporary file beside ``target``: write to ``file``, then :func:`commit` it; ``discard()`` removes it.

    The file is locked while it is written. One that lies there without a lock was left by a process that was killed;
    the next output to the same target removes it.
    """

    def __init__(self, target: Path) -> None:
        """Raises FileError when the folder cannot be written to."""
        # A link is followed, so that its target is replaced and the link stays.
        self.target = Path(os.path.realpath(target))
        self._synced = False
        try:
            self._remove_leftovers()
            fd, self.temp = self._create()
        except OSError as error:
            raise FileError(f"cannot write {printable(str(target))}: {os_reason(error)}") from error
        self.file: BinaryIO = os.fdopen(fd, "wb", buffering=1 << 20)

    @property
    def _prefix(self) -> str:
        return f"{_TEMP_PREFIX}{hashlib.sha256(os.fsencode(self.target.name)).hexdigest()[:16]}-"

    def _remove_leftovers(self) -> None:
        for path in self.target.parent.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError):  # another process has it, or was faster
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(fd)

    def _create(self) -> tuple[int, Path]:
        """A locked temporary file with the mode of the file that it replaces, or what open() would give."""
        while True:
            fd, name = tempfile.mkstemp(prefix=self._prefix, dir=self.target.parent)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:  # else another process took it for a leftover before it was locked
                break
            os.close(fd)
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(fd, (self.target.stat().st_mode & 0o777) if self.target.exists() else 0o666 & ~umask)
        return fd, Path(name)

    def sync(self) -> None:
        """Brings everything to the disk, once. Raises FileError (a full disk shows here at the latest)."""
        if self._synced:
            return
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise FileError(f"cannot write {printable(str(self.target))}: {os_reason(error)}") from error
        self._synced = True

    def _rename(self) -> None:
        try:
            self.temp.replace(self.target)
        except OSError as error:
            raise FileError(f"cannot write {printable(str(self.target))}: {os_reason(error)}") from error
        self.file.close()

    def discard(self) -> None:
        """Closes the file and removes it, if it was not renamed."""
        with contextlib.suppress(OSError):
            self.file.close()
        self.temp.unlink(missing_ok=True)


def commit(outputs: Sequence[Output], force: bool, stale: Sequence[Path] = ()) -> None:
    """Renames complete files of one folder into place, and removes the files ``stale`` before the last one is there.

    Processes that write several files to one folder do this one after the other, so that those of one run stay
    together. Raises FileError: without ``force`` also where a target has appeared meanwhile; nothing has been renamed
    then.
    """
    for output in outputs:
        output.sync()
    with _locked(outputs[-1].target.parent) if len(outputs) > 1 else contextlib.nullcontext():
        taken = next((o.target for o in outputs if not force and o.target.exists()), None)
        if taken is not None:
            raise _exists(taken)
        for output in outputs[:-1]:
            output._rename()
        for path in stale:
            with contextlib.suppress(OSError):
                path.unlink()
        outputs[-1]._rename()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of ``folder``; goes on without it where the file system has none."""
    fd = -1
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


@contextlib.contextmanager
def atomic_output(
    target: str | os.PathLike[str], force: bool = False, inputs: tuple[Path, ...] = ()
) -> Iterator[BinaryIO]:
    """A binary file to write ``target`` through; it appears under its name only when the block ends without an error.

    Raises FileError: target exists and not ``force``, is one of ``inputs``, or the operating system refuses.
    """
    path = Path(target)
    check_target(path, force, inputs)
    output = Output(path)
    try:
        yield output.file
        commit([output], force)
    except OSError as error:
        raise FileError(f"cannot write {printable(str(path))}: {os_reason(error)}") from error
    finally:
        output.discard()  # nothing to remove after a commit


def write_bytes(
    target: str | os.PathLike[str], data: bytes, force: bool = False, inputs: tuple[Path, ...] = ()
) -> None:
    """Writes a small file atomically; see :func:`atomic_output`."""
    with atomic_output(target, force, inputs) as f:
        f.write(data)
