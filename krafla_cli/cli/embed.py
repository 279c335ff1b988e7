"""``mlb embed``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from krafla_cli.cli.common import (
    FILE_PATH,
    TerminalProgress,
    common_options,
    force_option,
    json_option,
    note,
    print_json,
    ray_options,
    threads_option,
)

if TYPE_CHECKING:
    from krafla_cli.embed.embedder import Embedder

Rows: TypeAlias = Iterator[tuple[list[str], Any]]  # texts and their float32 [texts, width]
_CHUNK = 4096  # texts embedded at once: bounds memory, and is plenty for batches of like length


@click.command("embed")
@click.argument("model", type=FILE_PATH)
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("-f", "--file", "files", type=FILE_PATH, multiple=True, help="Texts, a line each; a glob; - is stdin.")
@click.option("--field", help="JSON lines or Parquet; the text is in this field [*.jsonl, *.parquet: text].")
@click.option("--dims", type=int, help="Width: one of the model's Matryoshka widths [default: the full one].")
@click.option("-o", "--output", type=FILE_PATH, help="Write float32 rows: .npy or .jsonl; a folder: Parquet shards.")
@click.option("--shard-texts", type=click.IntRange(1), help="Texts in a shard [default: 8192].")
@click.option("--strict", is_flag=True, help="Shards: stop at a text that cannot be read, not leave it out.")
@ray_options
@threads_option()
@force_option
@json_option
@common_options
def command(**options: Any) -> None:
    """Embed texts with a LEMB model.

    \b
    mlb embed model.bin "merhaba" "selam" --dims 128     a table, with the cosine to the first text
    mlb embed model.bin -f corpus.txt -o corpus.npy      one row for each line
    mlb embed model.bin -f docs.jsonl --field body --json
    mlb embed model.bin -f 'corpus/*.parquet' -o out/    shards; once more goes on where a killed job was
    mlb embed model.bin -f 'corpus/*.parquet' -o out/ --ray head:6379

    An empty text has the embedding of [CLS] [SEP]. With --json and -o, the document tells what was written.
    """
    _embed(**options)


def _embed(
    model: Path,
    texts: tuple[str, ...],
    files: tuple[Path, ...],
    field: str | None,
    dims: int | None,
    output: Path | None,
    threads: int | None,
    force: bool,
    as_json: bool,
    **corpus: Any,
) -> None:
    if bool(texts) == bool(files):
        raise click.UsageError("give TEXT arguments or -f FILE")
    if field is not None and not files:
        raise click.UsageError("--field goes with -f FILE")
    if files and output is not None and (output.is_dir() or not output.suffix):
        from krafla_cli.cli.embed_corpus import embed_to_shards

        embed_to_shards(model, files, field, dims, output, threads, force, as_json, **corpus)
        return
    if any(corpus.values()):
        raise click.UsageError("--ray, --workers, --shard-texts and --strict are for -f FILE with a folder, -o out/")
    from krafla_cli.embed.threads import limit_library_threads

    n_threads = limit_library_threads(threads)
    from krafla_cli.embed.corpus import count_texts
    from krafla_cli.embed.embedder import open_embedder
    from krafla_cli.formats.atomic import check_target
    from krafla_cli.globs import expand

    paths = expand([str(file) for file in files])
    inputs = (model, *paths)
    if output is not None:
        check_target(output, force, inputs)
    embedder = open_embedder(model, n_threads, TerminalProgress())
    width = embedder.check_dims(dims)
    rows = _rows(embedder, width, _source(texts, paths, field), count_texts(paths, field) or len(texts))
    if output is not None:
        _write(embedder, width, rows, output, force, inputs, as_json)
    elif as_json:
        _print_json(embedder, width, rows)
    else:
        _print_table(width, rows)


def _source(texts: tuple[str, ...], paths: list[Path], field: str | None) -> Iterator[str]:
    """The texts of the command line or of the files."""
    from krafla_cli.embed.corpus import texts_of
    from krafla_cli.embed.texts import check_unicode

    if paths:
        return texts_of(paths, field)
    return iter([check_unicode(text, f"text {i}") for i, text in enumerate(texts, 1)])


def _rows(embedder: Embedder, width: int, texts: Iterator[str], n_texts: int) -> Rows:
    """Chunks of texts with their rows, under a bar; ``n_texts`` is 0 when it is not known."""
    from krafla_cli.embed.texts import chunks

    progress = TerminalProgress()
    progress.start("embedding", n_texts, "text")
    try:
        yield from embedder.embed_chunks(chunks(texts, _CHUNK), width, progress)
    finally:
        progress.finish()


def _write(
    embedder: Embedder,
    width: int,
    rows_of_chunks: Rows,
    output: Path,
    force: bool,
    inputs: tuple[Path, ...],
    as_json: bool,
) -> None:
    from krafla_cli.embed.vectors import vector_writer
    from krafla_cli.formats.atomic import atomic_output
    from krafla_cli.formats.text import printable

    make_writer = vector_writer(output)
    n = 0
    with atomic_output(output, force, inputs) as out:
        writer = make_writer(out, width)
        for chunk, rows in rows_of_chunks:
            writer.write(chunk, rows)
            n += len(chunk)
        writer.finish()
    if as_json:
        print_json({"path": str(output), "n_texts": n, "dims": width, "model": _identity(embedder)})
    else:
        note(f"{printable(str(output))}: {n} embeddings of {width} dimensions")


def _identity(embedder: Embedder) -> dict[str, Any]:
    header = embedder.model.header
    return {"model_id": header.name, "model_version": header.version, "has_fingerprint": header.has_fingerprint}


def _print_json(embedder: Embedder, width: int, rows_of_chunks: Rows) -> None:
    from krafla_cli.embed.vectors import documents

    embeddings = [d for chunk, rows in rows_of_chunks for d in documents(chunk, rows)]
    print_json({"model": _identity(embedder), "dims": width, "embeddings": embeddings})


def _print_table(width: int, rows_of_chunks: Rows) -> None:
    """Text, cosine to the first text, first values."""
    from krafla_cli.formats.text import printable

    first = None
    for chunk, rows in rows_of_chunks:
        if first is None:
            first = rows[0]
            click.echo(f"{'text':<42} {'cosine':>7}  first of {width} values")
        for text, row in zip(chunk, rows, strict=True):
            values = " ".join(f"{v:+.4f}" for v in row[:4].tolist())
            click.echo(f"{printable(text, 40):<42} {float(first @ row):+7.4f}  {values}")
