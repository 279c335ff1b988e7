"""``mlb embed -f ... -o FOLDER``: a corpus into Parquet shards, on this machine or on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from krafla_cli.cli.common import TerminalProgress, note, open_pool, print_json

if TYPE_CHECKING:
    from krafla_cli.embed.shards import Report


def embed_to_shards(
    model: Path,
    files: tuple[Path, ...],
    field: str | None,
    dims: int | None,
    output: Path,
    threads: int | None,
    force: bool,
    as_json: bool,
    shard_texts: int | None,
    strict: bool,
    ray: str | None,
    workers: int | None,
) -> None:
    """Embeds the files into shards in the folder ``output``."""
    if Path("-") in files:
        raise click.UsageError("shards are made of files, which are read more than once; - can be read once only")
    from krafla_cli.embed.threads import limit_library_threads

    n_threads = limit_library_threads(threads if ray is None else threads or 1)
    progress = TerminalProgress()
    with open_pool(ray, workers, n_threads, progress) as pool:
        from krafla_cli.embed.shards import TEXTS_PER_SHARD, Options, embed_corpus
        from krafla_cli.globs import expand

        options = Options(model, dims, field, shard_texts or TEXTS_PER_SHARD, n_threads, strict)
        paths = expand([str(file) for file in files])
        report = embed_corpus(paths, output, options, pool, force, progress)
    if as_json:
        print_json(_document(output, report))
    else:
        _tell(output, report)


def _document(output: Path, report: Report) -> dict[str, object]:
    return {
        "path": str(output),
        "n_texts": report.n_texts,
        "n_unreadable": report.n_unreadable,
        "n_unreadable_files": report.n_unreadable_files,
        "unreadable": report.messages,
        "n_shards": report.n_shards,
        "n_shards_kept": report.n_kept,
        "texts_per_second_per_worker": report.speeds.per_worker,
    }


def _tell(output: Path, report: Report) -> None:
    from krafla_cli.formats.text import counted, printable

    kept = f", {report.n_kept} of them there already" if report.n_kept else ""
    note(
        f"{printable(str(output))}: {counted(report.n_texts, 'embedding')} in {counted(report.n_shards, 'shard')}{kept}"
    )
    if report.faults:
        counts = ((report.n_unreadable_files, "file"), (report.n_unreadable, "text"))
        unreadable = " and ".join(counted(n, noun) for n, noun in counts if n)
        note(f"{unreadable} could not be read; see manifest.json there")
    if speed := report.speeds.text("texts"):
        note(speed)
