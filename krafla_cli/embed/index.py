"""Building a search index: a corpus embedded into a folder, chunk by chunk.

All is written to a folder ``NAME.partial`` beside the target and renamed when it is complete. From time to time what
is there is brought to the disk and ``state.json`` says how much that is, so that a build that was ended goes on from
there; it checks that model, options and the texts that are done with are still the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from krafla_cli.embed.corpus import count_texts, texts_of
from krafla_cli.embed.embedder import Embedder
from krafla_cli.embed.texts import chunks
from krafla_cli.errors import FileError, InputError, MlbError, os_reason
from krafla_cli.formats.atomic import write_bytes
from krafla_cli.formats.index_folder import (
    DTYPES,
    FILES,
    INDEX_VERSION,
    MANIFEST,
    OFFSETS,
    SCALES,
    TEXTS,
    VECTORS,
    Manifest,
    text_line,
)
from krafla_cli.formats.json_file import read_json_object
from krafla_cli.formats.npy import HEADER_BYTES, npy_header
from krafla_cli.formats.text import printable
from krafla_cli.progress import SILENT, Progress

Float32 = npt.NDArray[np.float32]

CHUNK = 4096  # texts embedded at once
CHUNKS_PER_CHECKPOINT = 4
_STATE = "state.json"
_KEYS = ("model_sha256", "dims", "dtype")  # what must be the same for a build to go on


@dataclass(frozen=True)
class Source:
    """Where texts come from: a file (or "-"), and the field of its JSON lines or Parquet (None: by its name)."""

    path: Path
    field: str | None = None

    @contextlib.contextmanager
    def texts(self) -> Iterator[Iterator[str]]:
        """The texts, from the first on. Raises FileError, FormatError, InputError."""
        with contextlib.closing(texts_of([self.path], self.field)) as found:
            yield found


@dataclass
class _Done:
    """How much of a build is on the disk: rows, bytes of texts, and the SHA-256 of those."""

    n_rows: int = 0
    n_text_bytes: int = 0
    texts_sha256: str = hashlib.sha256().hexdigest()


def build(
    embedder: Embedder,
    model: Path,
    source: Source,
    target: Path,
    dims: int | None = None,
    dtype: str = "float32",
    force: bool = False,
    progress: Progress = SILENT,
) -> tuple[Manifest, int]:
    """Embeds the texts of ``source`` with ``embedder``, opened from ``model``, into the index ``target``.

    Returns its manifest, and how many rows came from a build that was ended before. Raises FileError (exists already,
    cannot be written), InputError (dims, no texts), and what reading and embedding texts raises.
    """
    target = Path(os.path.realpath(target))
    width = embedder.check_dims(dims)
    check_folder(target, force)
    header = embedder.model.header
    manifest = Manifest(
        index_version=INDEX_VERSION,
        model_id=header.name,
        model_version=header.version,
        dims=width,
        license_id=header.license_id,
        has_fingerprint=header.has_fingerprint,
        model_sha256=embedder.model.sha256 or "",
        model=os.path.relpath(os.path.realpath(model), target),
        dtype=dtype,
        count=0,
    )
    try:
        with _locked_folder(target.with_name(f"{target.name}.partial")) as partial:
            count, n_before = _Build(embedder, manifest, source, partial, progress).run()
            manifest = replace(manifest, count=count)
            write_bytes(partial / MANIFEST, manifest.to_bytes(), force=True)
            _replace(partial, target)
    except OSError as error:
        raise FileError(f"cannot write {printable(str(target))}: {os_reason(error)}") from error
    return manifest, n_before


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def check_folder(target: Path, force: bool) -> None:
    """Refuses a target that exists (without ``force``), that is more than an index, or whose folder is missing.

    Raises FileError.
    """
    name = printable(str(target))
    if not target.parent.is_dir():
        raise FileError(f"cannot write {name}: the folder {printable(str(target.parent))} does not exist")
    if not target.exists():
        return
    if not target.is_dir():
        raise FileError(f"cannot write {name}: it is a file; an index is a folder")
    others = sorted({p.name for p in target.iterdir()} - {*FILES, _STATE})
    if others:
        raise FileError(f"cannot write {name}: the folder holds other things ({printable(others[0])})")
    if not force and any(target.iterdir()):
        raise FileError(f"{name} exists already; --force overwrites it")


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[Path]:
    """``folder``, made where it is missing, for this process alone; it stays if there is something to go on from."""
    folder.mkdir(exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileError(f"{printable(str(folder))}: another build is writing it") from error
        try:
            yield folder
        finally:
            if not (folder / _STATE).exists():
                _remove(folder)
    finally:
        os.close(fd)


def _replace(partial: Path, target: Path) -> None:
    """Renames ``partial`` to ``target``; what was there is moved aside first and removed after."""
    old = target.with_name(f"{target.name}.replaced")
    if target.exists():
        _remove(old)
        target.rename(old)
    partial.rename(target)
    (target / _STATE).unlink(missing_ok=True)
    _remove(old)


def _remove(folder: Path) -> None:
    """Removes an index and its folder; other files in it would make that fail."""
    if folder.is_dir():
        for name in (*FILES, _STATE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


# ---------------------------------------------------------------------------------------------------------------------
# One build


class _Build:
    """The work in the folder ``partial``."""

    def __init__(
        self, embedder: Embedder, manifest: Manifest, source: Source, partial: Path, progress: Progress
    ) -> None:
        self.embedder, self.manifest, self.source = embedder, manifest, source
        self.partial, self.progress = partial, progress

    def run(self) -> tuple[int, int]:
        """Writes all files but the manifest; returns the rows, and those of them that were there before."""
        done = self._done()
        self.progress.start("embedding", count_texts([self.source.path], self.source.field), "text")
        try:
            with contextlib.ExitStack() as stack:
                texts = stack.enter_context(self.source.texts())
                if not self._skip(texts, done):
                    self.progress.info(f"{printable(str(self.partial))}: not of these texts; starting over")
                    done = _Done()
                    texts = stack.enter_context(self.source.texts())
                n_before = done.n_rows
                writer = stack.enter_context(_writer(self.partial, self.manifest, done))
                self._embed(texts, writer, n_before)
                writer.finish()
                return writer.n_rows, n_before
        finally:
            self.progress.finish()

    def _done(self) -> _Done:
        """What an earlier build left that this one can go on with."""
        if str(self.source.path) == "-":  # if it turned out to be of other texts, they could not be read again
            return _Done()
        try:
            state = read_json_object(self.partial / _STATE)
            done = _Done(int(state["n_rows"]), int(state["n_text_bytes"]), str(state["texts_sha256"]))
        except (MlbError, KeyError, TypeError, ValueError):
            return _Done()
        same = all(state.get(key) == getattr(self.manifest, key) for key in _KEYS)
        return done if same and done.n_rows >= 0 and _has_all(self.partial, self.manifest, done) else _Done()

    def _skip(self, texts: Iterator[str], done: _Done) -> bool:
        """Reads the texts that are done with; whether they are those that were."""
        digest = hashlib.sha256()
        n_bytes = n_rows = 0
        for text in islice(texts, done.n_rows):
            line = text_line(text)
            digest.update(line)
            n_bytes += len(line)
            n_rows += 1
        self.progress.advance(n_rows)
        return (n_rows, n_bytes, digest.hexdigest()) == (done.n_rows, done.n_text_bytes, done.texts_sha256)

    def _embed(self, texts: Iterator[str], writer: _Writer, n_before: int) -> None:
        rows_of_chunks = self.embedder.embed_chunks(
            chunks(texts, CHUNK), self.manifest.dims, self.progress, n_before + 1
        )
        for i, (chunk, rows) in enumerate(rows_of_chunks, 1):
            writer.append(chunk, rows)
            if i % CHUNKS_PER_CHECKPOINT == 0:
                writer.checkpoint()
        if writer.n_rows == 0:
            raise InputError(f"{printable(str(self.source.path))}: holds no texts")


def _row_bytes(manifest: Manifest) -> dict[str, int]:
    """Bytes of a row in each of the arrays that an index of this kind has."""
    item = np.dtype(DTYPES[manifest.dtype]).itemsize
    return {VECTORS: manifest.dims * item, OFFSETS: 8} | ({SCALES: 4} if manifest.dtype == "int8" else {})


def _has_all(partial: Path, manifest: Manifest, done: _Done) -> bool:
    """Whether the files are as long as the state says, at least."""
    sizes = {name: HEADER_BYTES + done.n_rows * n for name, n in _row_bytes(manifest).items()}
    sizes[TEXTS] = done.n_text_bytes
    return all((partial / name).is_file() and (partial / name).stat().st_size >= size for name, size in sizes.items())


@contextlib.contextmanager
def _writer(partial: Path, manifest: Manifest, done: _Done) -> Iterator[_Writer]:
    writer = _Writer(partial, manifest, done)
    try:
        yield writer
    finally:
        writer.close()


class _Writer:
    """The growing files of an index. offsets.npy gets each line's end; the start of all, 0, is its first element."""

    def __init__(self, partial: Path, manifest: Manifest, done: _Done) -> None:
        self.partial, self.manifest = partial, manifest
        self.n_rows, self.n_text_bytes = done.n_rows, done.n_text_bytes
        if not self.n_rows:
            for name in (*FILES, _STATE):  # of another kind, perhaps
                (partial / name).unlink(missing_ok=True)
        row_bytes = _row_bytes(manifest)
        sizes = {name: HEADER_BYTES + self.n_rows * n for name, n in row_bytes.items()}
        sizes[OFFSETS] += 8 if self.n_rows else 0
        self._files = {
            name: _opened_at(partial / name, size) for name, size in {**sizes, TEXTS: done.n_text_bytes}.items()
        }
        self._digest = hashlib.sha256()
        self._digest_of(done.n_text_bytes)
        if not self.n_rows:
            self._files[OFFSETS].write(bytes(8))

    def _digest_of(self, n_bytes: int) -> None:
        """Starts the texts' digest with what is there."""
        with (self.partial / TEXTS).open("rb") as f:
            while n_bytes > 0:
                block = f.read(min(n_bytes, 1 << 20))
                if not block:
                    raise FileError(f"{printable(str(self.partial / TEXTS))}: became shorter while it was read")
                self._digest.update(block)
                n_bytes -= len(block)

    def append(self, texts: list[str], rows: Float32) -> None:
        """Adds rows [n, dims] and their texts."""
        lines = [text_line(text) for text in texts]
        ends = self.n_text_bytes + np.cumsum([len(line) for line in lines])
        content = b"".join(lines)
        self._digest.update(content)
        self._files[TEXTS].write(content)
        self._files[OFFSETS].write(ends.astype("<i8").data)
        if self.manifest.dtype == "int8":
            codes, scales = quantized(rows)
            self._files[SCALES].write(scales.astype("<f4").data)
            self._files[VECTORS].write(codes.data)
        else:
            self._files[VECTORS].write(np.ascontiguousarray(rows, "<f4").data)
        self.n_rows += len(texts)
        self.n_text_bytes += len(content)

    def checkpoint(self) -> None:
        """Brings what there is to the disk, then says so."""
        self._sync()
        state = {name: getattr(self.manifest, name) for name in _KEYS} | {
            "n_rows": self.n_rows,
            "n_text_bytes": self.n_text_bytes,
            "texts_sha256": self._digest.hexdigest(),
        }
        write_bytes(self.partial / _STATE, json.dumps(state).encode("ascii"), force=True)

    def finish(self) -> None:
        """Writes the headers, now that the number of rows is known."""
        descr = DTYPES[self.manifest.dtype]
        shapes = {VECTORS: (descr, (self.n_rows, self.manifest.dims)), OFFSETS: ("<i8", (self.n_rows + 1,))}
        if SCALES in self._files:
            shapes[SCALES] = ("<f4", (self.n_rows,))
        for name, (kind, shape) in shapes.items():
            self._files[name].seek(0)
            self._files[name].write(npy_header(kind, shape))
        self.checkpoint()

    def _sync(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk has been reported by what was written before
                file.close()


def _opened_at(path: Path, size: int) -> BinaryIO:
    """``path`` open for writing at ``size``, where it ends; it is made, or cut, or filled with zeros up to there."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    file = os.fdopen(fd, "r+b", buffering=1 << 20)
    file.truncate(size)
    file.seek(size)
    return file


def quantized(rows: Float32) -> tuple[npt.NDArray[np.int8], Float32]:
    """Codes -127 .. 127 (nearest, ties to even) and scale = largest magnitude / 127 of each row [n, dims]."""
    scales = np.abs(rows).max(axis=1) / np.float32(127)
    levels = np.divide(rows, scales[:, None], where=scales[:, None] != 0, out=np.zeros_like(rows))
    return np.clip(np.rint(levels), -127, 127).astype(np.int8), scales.astype(np.float32)
