"""The license registry: a JSON line for each license with its secret key. Keys are never shown, nor are lines."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from krafla_cli.embed.rotation import KEY_BYTES
from krafla_cli.embed.texts import check_unicode
from krafla_cli.errors import DataError, FileError, FormatError, MlbError, os_reason
from krafla_cli.formats.json_file import parse_json
from krafla_cli.formats.text import printable
from krafla_cli.progress import SILENT, Progress

MAX_LICENSE_ID = 0xFFFFFFFF
_MAX_BYTES = 64 << 20
_MODE = 0o600


@dataclass(frozen=True)
class License:
    """A line of the registry: the license, whose it is, and the key of its fingerprint."""

    license_id: int
    customer: str
    key: bytes = field(repr=False)


def read_registry(path: Path, progress: Progress = SILENT) -> dict[int, License]:
    """All licenses by id. Raises FileError (cannot be read), FormatError (naming the line by number, not its text)."""
    try:
        with path.open("rb") as f:
            _check_mode(f.fileno(), path, progress)
            data = _read_all(f.fileno())
    except OSError as error:
        raise FileError(f"cannot open {printable(str(path))}: {os_reason(error)}") from error
    return _parse(data, printable(str(path)))


def key_of_license(path: Path, license_id: int, progress: Progress = SILENT) -> bytes:
    """The key of one license. Raises as :func:`read_registry`, and DataError when the license is not there."""
    found = read_registry(path, progress).get(license_id)
    if found is None:
        raise DataError(
            f"{printable(str(path))}: has no license {license_id}; `mlb fingerprint new-key` makes a key for it"
        )
    return found.key


def add_license(path: Path, license_id: int, customer: str) -> License:
    """Makes a key for a new license and appends its line; the registry is created if need be, with mode 600.

    Raises FileError, FormatError (as :func:`read_registry`), DataError (the license is there already, or 0),
    InputError (a customer that is not valid Unicode: the registry could not be read again).
    """
    if not 1 <= license_id <= MAX_LICENSE_ID:
        raise DataError(f"license {license_id}: must be 1 to {MAX_LICENSE_ID} (0 means unlicensed)")
    check_unicode(customer, "customer")
    name = printable(str(path))
    with _locked(path) as fd:
        data = _read_all(fd)
        known = _parse(data, name).get(license_id)
        if known is not None:
            customer_of = printable(known.customer, 60)
            raise DataError(f"{name}: license {license_id} is there already ({customer_of}); give another --license-id")
        added = License(license_id, customer, secrets.token_bytes(KEY_BYTES))
        line = json.dumps({"license_id": license_id, "customer": customer, "key": added.key.hex()})
        separator = b"\n" if data and not data.endswith(b"\n") else b""
        _append(fd, separator + line.encode("ascii") + b"\n", len(data))
    return added


def read_key_file(path: Path, progress: Progress = SILENT) -> bytes:
    """The 32 bytes of a file with 64 hexadecimal digits. Raises FileError, FormatError."""
    try:
        with path.open("rb") as f:
            _check_mode(f.fileno(), path, progress)
            text = f.read(1024)
    except OSError as error:
        raise FileError(f"cannot open {printable(str(path))}: {os_reason(error)}") from error
    return _key(text.strip().decode("ascii", errors="replace"), printable(str(path)))


# ---------------------------------------------------------------------------------------------------------------------


def _parse(data: bytes, name: str) -> dict[int, License]:
    if len(data) > _MAX_BYTES:
        raise FormatError(f"{name}: over {_MAX_BYTES} bytes, no registry")
    found: dict[int, License] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        entry = _license(parse_json(line, f"{name}: line {number}"), f"{name}: line {number}")
        if entry.license_id in found:
            raise FormatError(f"{name}: line {number}: license {entry.license_id} occurs twice")
        found[entry.license_id] = entry
    return found


def _license(document: Any, where: str) -> License:
    if not isinstance(document, dict):
        raise FormatError(f"{where}: must be an object with license_id, customer and key")
    license_id, customer, key = (document.get(k) for k in ("license_id", "customer", "key"))
    if not isinstance(license_id, int) or isinstance(license_id, bool) or not 1 <= license_id <= MAX_LICENSE_ID:
        raise FormatError(f"{where}: license_id must be 1 to {MAX_LICENSE_ID}")
    if not isinstance(customer, str):
        raise FormatError(f"{where}: customer must be text")
    return License(license_id, customer, _key(key if isinstance(key, str) else "", where))


def _key(digits: str, where: str) -> bytes:
    if len(digits) != 2 * KEY_BYTES or not set(digits.lower()) <= set("0123456789abcdef"):
        raise FormatError(f"{where}: the key must be {2 * KEY_BYTES} hexadecimal digits")
    return bytes.fromhex(digits)


def _check_mode(fd: int, path: Path, progress: Progress) -> None:
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_mode & 0o077:
        progress.warn(f"{printable(str(path))} holds keys and can be read by others; chmod 600 it")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The registry open for reading and appending, mode 600, locked so that two writers do not mix."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)
    except OSError as error:
        raise FileError(f"cannot write {printable(str(path))}: {os_reason(error)}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileError(f"cannot write {printable(str(path))}: not a regular file")
        _lock(fd)
        os.fchmod(fd, _MODE)
        yield fd
    except MlbError:
        raise
    except OSError as error:
        raise FileError(f"cannot write {printable(str(path))}: {os_reason(error)}") from error
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    fcntl.flock(fd, fcntl.LOCK_EX)


def _read_all(fd: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as f:
        f.seek(0)
        return f.read(min(os.fstat(fd).st_size, _MAX_BYTES) + 1)  # a buffer for what is there, not for the limit


def _append(fd: int, line: bytes, size: int) -> None:
    """Appends ``line`` whole or not at all."""
    try:
        rest = line
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise
