"""Embedding a corpus into a folder of Parquet shards and a manifest, so that a killed job goes on where it was.

Shard i holds the texts i * n to (i + 1) * n of a file and is a function of the job and i alone; a pool's workers write
them in any order, each renamed into place. The manifest is written before the first one, so that nothing else is ever
mixed in, and again with the counts when all are there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from krafla_cli.embed import parquet
from krafla_cli.embed.corpus import Source, Stretch, Unreadable, read_stretch, scan, stretches
from krafla_cli.embed.embedder import Embedder, open_embedder
from krafla_cli.errors import DataError, FileError, FormatError, InputError, MlbError, os_reason
from krafla_cli.formats.atomic import atomic_output, write_bytes
from krafla_cli.formats.index_folder import INDEX_VERSION, MANIFEST
from krafla_cli.formats.json_file import read_json_object
from krafla_cli.formats.text import printable
from krafla_cli.pool import Pool, Speeds
from krafla_cli.progress import SILENT, Progress

TEXTS_PER_SHARD = 8192
_CHUNK_TEXTS = 4096  # embedded at once
_CHUNK_CHARS = 8 << 20
_MAX_MESSAGES = 20  # of unreadable texts, kept for a shard and for the manifest, and shown


@dataclass(frozen=True)
class Options:
    """What is asked for. ``threads`` are each worker's; they do not change the result."""

    model: Path
    dims: int | None = None
    field: str | None = None
    texts_per_shard: int = TEXTS_PER_SHARD
    threads: int = 1
    strict: bool = False


@dataclass(frozen=True)
class Job:
    """A model and a scanned corpus. ``document`` is the manifest as far as it is known before the work."""

    options: Options
    dims: int
    sources: tuple[Source, ...]
    document: dict[str, Any]

    @property
    def key(self) -> str:
        """SHA-256 of everything that the shards depend on."""
        return hashlib.sha256(json.dumps(_identity(self.document), sort_keys=True).encode()).hexdigest()

    @property
    def n_texts(self) -> int:
        """Texts of the corpus, unreadable ones included."""
        return sum(source.n_texts for source in self.sources)

    def shards(self) -> Iterator[Shard]:
        """All shards in order."""
        index = first_id = 0
        for source in self.sources:
            for stretch in stretches(source, self.options.texts_per_shard):
                yield Shard(index, first_id, stretch)
                index += 1
                first_id += stretch.n_texts


@dataclass(frozen=True, slots=True)
class Shard:
    """The piece of work of one output file; ``first_id``: number of its first text in the corpus, from 0."""

    index: int
    first_id: int
    stretch: Stretch

    @property
    def name(self) -> str:
        return f"part-{self.index:06d}.parquet"


@dataclass
class Report:
    """What a run of a job came to. ``n_kept``: shards that were there already.

    ``faults``: by shard (-1: whole files), what is wrong with texts that could not be read, the first of them.
    """

    n_texts: int = 0
    n_unreadable: int = 0
    faults: dict[int, list[str]] = field(default_factory=dict)
    n_shards: int = 0
    n_kept: int = 0
    speeds: Speeds = field(default_factory=Speeds)

    @property
    def n_unreadable_files(self) -> int:
        """Files in which nothing can be read, so that nobody knows how many texts they have."""
        return len(self.faults.get(-1, ()))

    @property
    def messages(self) -> list[str]:
        """The first faults, in the order of the corpus."""
        return [message for shard in sorted(self.faults) for message in self.faults[shard]][:_MAX_MESSAGES]

    def add(self, document: dict[str, Any], speak: Callable[[str], None]) -> None:
        """Counts a shard; ``speak`` is given what is wrong in it, as long as that is not too much."""
        self.n_shards += 1
        self.n_texts += document["count"]
        self.n_unreadable += document["n_unreadable"]
        self.add_faults(document["shard"], document["unreadable"], speak)

    def add_faults(self, shard: int, messages: list[str], speak: Callable[[str], None]) -> None:
        """Keeps what is wrong in a shard."""
        n_shown = sum(map(len, self.faults.values()))
        for message in messages[: max(_MAX_MESSAGES - n_shown, 0)]:
            speak(message)
        if messages:
            self.faults[shard] = messages


def embed_corpus(
    paths: list[Path], folder: Path, options: Options, pool: Pool, force: bool = False, progress: Progress = SILENT
) -> Report:
    """Embeds the texts of ``paths`` into ``folder``; what an earlier run of the same job left there is kept.

    ``force`` removes what another job left there. Raises FileError, InputError (another job's folder, no texts),
    DataError; with ``options.strict``, FormatError for the first text that cannot be read.
    """
    options = replace(options, model=options.model.absolute())  # a worker may run elsewhere
    job = plan(paths, options, pool, progress)
    check_folder(folder, job, force)
    speak = _raise if options.strict else progress.warn
    report = Report()
    report.add_faults(-1, [source.fault for source in job.sources if source.fault is not None], speak)
    todo = list(_missing(job, folder, report))
    progress.start("embedding", job.n_texts, "text")
    progress.advance(report.n_texts + report.n_unreadable)
    try:
        open_worker = partial(open_shard_worker, options, job.document["model_sha256"], job.key, folder.absolute())
        for done in pool.map(open_worker, todo):
            report.add(done.value, speak)
            report.speeds.add(done, done.value["count"])
            progress.advance(done.value["count"] + done.value["n_unreadable"])
    finally:
        progress.finish()
    _finish(job, folder, report)
    return report


def _raise(message: str) -> None:
    raise FormatError(message)


# ---------------------------------------------------------------------------------------------------------------------
# The job


def plan(paths: list[Path], options: Options, pool: Pool, progress: Progress = SILENT) -> Job:
    """Opens the model and scans the corpus. Raises FileError, FormatError (the model), InputError (dims, no texts)."""
    embedder = open_embedder(options.model)
    dims = embedder.check_dims(options.dims)
    sources = tuple(_scanned(paths, options, pool, progress))
    if not any(source.n_texts for source in sources):
        faults = [source.fault for source in sources if source.fault]
        raise InputError(faults[0] if faults else "the corpus has no texts")
    document = {
        **model_document(embedder, dims),
        "texts_per_shard": options.texts_per_shard,
        "corpus": [
            {
                "path": source.name,
                "field": source.field,
                "n_texts": source.n_texts,
                "n_bytes": source.stamp[0],
                "sha256": source.sha256,
            }
            for source in sources
        ],
    }
    return Job(options, dims, sources, document)


def model_document(embedder: Embedder, dims: int) -> dict[str, Any]:
    """What a manifest says of the model (section 8 of the specification): the fields that a client compares."""
    header = embedder.model.header
    return {
        "index_version": INDEX_VERSION,
        "model_id": header.name,
        "model_version": header.version,
        "model_sha256": embedder.model.sha256,
        "dims": dims,
        "license_id": header.license_id,
        "has_fingerprint": header.has_fingerprint,
    }


def _scanned(paths: list[Path], options: Options, pool: Pool, progress: Progress) -> Iterator[Source]:
    progress.start("scanning", sum(path.stat().st_size for path in paths if path.exists()), "B")
    try:
        files = [(path.absolute(), str(path)) for path in paths]
        for done in pool.map(partial(_scanner, options.field, options.texts_per_shard), files):
            progress.advance(done.value.stamp[0])
            yield done.value
    finally:
        progress.finish()


def _scanner(json_field: str | None, texts_per_shard: int) -> Callable[[tuple[Path, str]], Source]:
    return lambda file: scan(*file, json_field, texts_per_shard)


def _identity(document: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for a job to go on, by words for people; files may have been moved."""
    corpus = document["corpus"]
    return {
        "index version": document["index_version"],
        "model": f"{document['model_id']} {document['model_version']} (SHA-256 {document['model_sha256']})",
        "dims": document["dims"],
        "texts in a shard": document["texts_per_shard"],
        "number of files": len(corpus),
        **{
            f"file {i} of the corpus": f"{f['n_bytes']} bytes, {_field_shown(f['field'])}, SHA-256 {f['sha256']}"
            for i, f in enumerate(corpus, 1)
        },
    }


def _field_shown(name: str | None) -> str:
    return "lines" if name is None else f"field {name!r}"


# ---------------------------------------------------------------------------------------------------------------------
# The folder


def check_folder(folder: Path, job: Job, force: bool) -> None:
    """Makes ``folder`` the job's: new, or as an earlier run of the job left it.

    Raises FileError (a file, no folder above it), InputError (of another job, both values; or of no job).
    """
    name = printable(str(folder))
    try:
        folder.mkdir(exist_ok=True)
        others = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise FileError(f"cannot write the folder {name}: {os_reason(error)}") from error
    manifest = folder / MANIFEST
    if manifest.exists():
        difference = _difference(read_json_object(manifest), job.document, name)
        if not difference:
            return
        if not force:
            raise InputError(f"{difference}; give another folder with -o, or --force to remove what is there")
        _remove_job(folder)
    elif others:
        raise InputError(f"{name} holds {printable(others[0].name)!r} and no {MANIFEST}; give a new folder with -o")
    write_bytes(manifest, _json({**job.document, "complete": False}))


def _difference(old: dict[str, Any], new: dict[str, Any], name: str) -> str:
    """The first thing in which two jobs differ, or an empty text."""
    try:
        before = _identity(old)
    except (KeyError, TypeError):
        return f"{name}/{MANIFEST} is no manifest of embeddings"
    now = _identity(new)
    what = next((key for key in now if before.get(key) != now[key]), None)
    if what is None:
        return ""
    return f"{name} is of another job: {what}: {printable(str(before.get(what)))} there, {now[what]} now"


def _remove_job(folder: Path) -> None:
    for path in folder.glob("part-*.parquet"):
        path.unlink()
    (folder / MANIFEST).unlink()


def _missing(job: Job, folder: Path, report: Report) -> Iterator[Shard]:
    """The shards that are not there; the others are counted.

    Raises InputError for a file that is no shard of it; with ``strict``, FormatError where one lacks texts.
    """
    for shard in job.shards():
        path = folder / shard.name
        if not path.exists():
            yield shard
            continue
        document = parquet.shard_document(path)
        if (document.get("job"), document.get("shard")) != (job.key, shard.index):
            raise InputError(f"{printable(str(path))} is a shard of another job; remove it and run the command again")
        report.n_kept += 1
        report.add(document, _raise if job.options.strict else _say_nothing)


def _say_nothing(message: str) -> None:
    """It was told by the run that wrote the shard, and is in the manifest."""


def _finish(job: Job, folder: Path, report: Report) -> None:
    counts = {
        "complete": True,
        "count": report.n_texts,
        "n_unreadable": report.n_unreadable,
        "n_unreadable_files": report.n_unreadable_files,
        "unreadable": report.messages,
        "n_shards": report.n_shards,
    }
    write_bytes(folder / MANIFEST, _json({**job.document, **counts}), force=True)


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=True) + "\n").encode()


# ---------------------------------------------------------------------------------------------------------------------
# A worker


def open_shard_worker(options: Options, model_sha256: str, key: str, folder: Path) -> ShardWorker:
    """Opens the model in a worker's process. Raises FileError, FormatError, DataError: not the model of the job."""
    embedder = open_embedder(options.model, options.threads)
    found = embedder.model.sha256
    if found != model_sha256:
        raise DataError(f"{printable(str(options.model))}: SHA-256 {found} on a worker, {model_sha256} where it began")
    return ShardWorker(embedder, options.dims, key, folder)


class ShardWorker:
    """Embeds shards and writes them."""

    def __init__(self, embedder: Embedder, dims: int | None, key: str, folder: Path) -> None:
        self.embedder = embedder
        self.dims = embedder.check_dims(dims)
        self.key = key
        self.folder = folder

    def __call__(self, shard: Shard) -> dict[str, Any]:
        """Writes one shard; returns the document in it: counts, and what is wrong with texts that are left out."""
        rows = parquet.Rows([], [], [])
        faults: list[Unreadable] = []
        for numbers, texts in _chunks(read_stretch(shard.stretch), faults):
            rows.ids += [shard.first_id + number - shard.stretch.first for number in numbers]
            rows.hashes += [hashlib.sha256(text.encode()).digest() for text in texts]
            rows.vectors.append(self._embed(texts, numbers, shard.stretch.name))
        document = {
            "job": self.key,
            "shard": shard.index,
            "count": len(rows.ids),
            "n_unreadable": sum(fault.n_texts for fault in faults),
            "unreadable": [fault.message for fault in faults[:_MAX_MESSAGES]],
        }
        # A worker that was cut off from its driver may have written the same bytes meanwhile.
        with atomic_output(self.folder / shard.name, force=True) as file:
            parquet.write_shard(file, rows, self.dims, document)
        return document

    def _embed(self, texts: list[str], numbers: list[int], name: str) -> parquet.Float32:
        try:
            return self.embedder.embed(texts, self.dims)
        except MlbError as error:
            raise DataError(f"{printable(name)}: from text {numbers[0] + 1} on: {error}") from error


def _chunks(
    texts: Iterable[tuple[int, str | Unreadable]], faults: list[Unreadable]
) -> Iterator[tuple[list[int], list[str]]]:
    """Numbers and texts in lists that bound memory; what is unreadable goes to ``faults``."""
    numbers: list[int] = []
    chunk: list[str] = []
    n_chars = 0
    for number, text in texts:
        if isinstance(text, Unreadable):
            faults.append(text)
            continue
        if chunk and (len(chunk) == _CHUNK_TEXTS or n_chars + len(text) > _CHUNK_CHARS):
            yield numbers, chunk
            numbers, chunk, n_chars = [], [], 0
        numbers.append(number)
        chunk.append(text)
        n_chars += len(text)
    if chunk:
        yield numbers, chunk
