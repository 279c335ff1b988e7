"""Output files that are complete or absent: written beside their target under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
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
        raise FileError(f"cannot write {name}: it is a folder; give a file name with -o")
    if not target.parent.is_dir():
        raise FileError(f"cannot write {name}: the folder {printable(str(target.parent))} does not exist")
    if not target.exists():
        return
    if not target.is_file():
        raise FileError(f"cannot write {name}: it is a device or a pipe, and the output is renamed into place")
    if any(source.exists() and source.samefile(target) for source in inputs):
        raise FileError(f"cannot write {name}: it is the input itself; give another name with -o")
    if not force:
        raise FileError(f"{name} exists already; --force overwrites it")


class Output:
    """A temporary file beside ``target``: write to ``file``, then ``commit()``; ``discard()`` removes it."""

    def __init__(self, target: Path) -> None:
        # A link is followed, so that its target is replaced and the link stays.
        self.target = Path(os.path.realpath(target))
        try:
            fd, name = tempfile.mkstemp(prefix=f"{_TEMP_PREFIX}{self.target.name[:100]}-", dir=self.target.parent)
        except OSError as error:
            raise FileError(f"cannot write {printable(str(target))}: {os_reason(error)}") from error
        self.temp = Path(name)
        self.file: BinaryIO = os.fdopen(fd, "wb", buffering=1 << 20)
        self._adopt_mode()

    def _adopt_mode(self) -> None:
        """mkstemp makes mode 600; an output has the mode of the file it replaces, or what open() would give."""
        umask = os.umask(0)
        os.umask(umask)
        mode = (self.target.stat().st_mode & 0o777) if self.target.exists() else 0o666 & ~umask
        os.fchmod(self.file.fileno(), mode)

    def close(self) -> None:
        """Flushes everything to the disk and closes the file. Raises FileError (a full disk shows here)."""
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        except OSError as error:
            raise FileError(f"cannot write {printable(str(self.target))}: {os_reason(error)}") from error

    def commit(self) -> None:
        """Closes and renames into place."""
        if not self.file.closed:
            self.close()
        try:
            self.temp.replace(self.target)
        except OSError as error:
            raise FileError(f"cannot write {printable(str(self.target))}: {os_reason(error)}") from error

    def discard(self) -> None:
        """Removes the temporary file."""
        with contextlib.suppress(OSError):
            self.file.close()
        self.temp.unlink(missing_ok=True)


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
        output.commit()
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
