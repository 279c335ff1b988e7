"""``mlb index``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from krafla_cli.cli.common import (
    FILE_PATH,
    TerminalProgress,
    common_options,
    force_option,
    json_option,
    note,
    print_json,
    threads_option,
)

if TYPE_CHECKING:
    from krafla_cli.embed.search import Hit
    from krafla_cli.formats.index_folder import Manifest


@click.group("index")
def command() -> None:
    """Make a corpus searchable by meaning with a LEMB model, and search it.

    \b
    mlb index build model.bin corpus.txt -o corpus.index     one row for each line
    mlb index search corpus.index "merhaba" -k 5

    The index knows which model made it: a search with another one is refused, since it would find plausible nonsense.
    """


@command.command("build")
@click.argument("model", type=FILE_PATH)
@click.argument("corpus", type=FILE_PATH)
@click.option("-o", "--output", type=FILE_PATH, required=True, help="The folder to make.")
@click.option("--field", help="JSON lines or Parquet; the text is in this field [*.jsonl, *.parquet: text].")
@click.option("--dims", type=int, help="Width: one of the model's Matryoshka widths [default: the full one].")
@click.option("--dtype", type=click.Choice(["float32", "int8"]), default="float32", show_default=True, help="Of rows.")
@threads_option()
@force_option
@json_option
@common_options
def build(**options: Any) -> None:
    """Embed CORPUS, texts one a line (- is stdin), JSON lines or Parquet, into an index.

    \b
    mlb index build model.bin corpus.txt -o corpus.index --dims 128 --dtype int8
    mlb index build model.bin docs.jsonl --field body -o docs.index

    A build that was ended goes on where it stopped when the same command is run again.
    """
    _build(**options)


def _build(
    model: Path,
    corpus: Path,
    output: Path,
    field: str | None,
    dims: int | None,
    dtype: str,
    threads: int | None,
    force: bool,
    as_json: bool,
) -> None:
    from krafla_cli.embed.threads import limit_library_threads

    n_threads = limit_library_threads(threads)
    from krafla_cli.embed import index
    from krafla_cli.embed.embedder import open_embedder
    from krafla_cli.formats.text import printable

    progress = TerminalProgress()
    index.check_folder(output, force)
    embedder = open_embedder(model, n_threads, progress)
    source = index.Source(corpus, field)
    manifest, n_before = index.build(embedder, model, source, output, dims, dtype, force, progress)
    if as_json:
        print_json({"path": str(output), "n_resumed": n_before, "manifest": vars(manifest)})
        return
    resumed = f", {n_before} of them from before" if n_before else ""
    note(f"{printable(str(output))}: {manifest.count} rows of {manifest.dims} dimensions, {dtype}{resumed}")


@command.command("search")
@click.argument("index", type=FILE_PATH)
@click.argument("query")
@click.option("-k", "n_hits", type=click.IntRange(1), default=10, show_default=True, help="How many rows to show.")
@click.option("--model", type=FILE_PATH, help="The model [default: where it was when the index was built].")
@threads_option()
@json_option
@common_options
def search(index: Path, query: str, n_hits: int, model: Path | None, threads: int | None, as_json: bool) -> None:
    """Show the rows of an index that are nearest to QUERY, best first, equal ones in the order of the corpus.

    \b
    mlb index search corpus.index "merhaba" -k 5
    mlb index search corpus.index "merhaba" --model ./model.bin --json

    A score is the product of the two vectors, their cosine; a row of int8 is taken as its codes times its scale.
    """
    from krafla_cli.embed.threads import limit_library_threads

    n_threads = limit_library_threads(threads)
    from krafla_cli.embed.embedder import Embedder
    from krafla_cli.embed.search import Searcher, check_model, model_of
    from krafla_cli.embed.texts import check_unicode
    from krafla_cli.formats.index_folder import open_index

    progress = TerminalProgress()
    check_unicode(query, "the query")
    folder = open_index(index)
    loaded = model_of(folder, model)
    check_model(folder.manifest, loaded, progress)
    vector = Embedder(loaded, 1, progress).embed([query], folder.manifest.dims)[0]
    hits = Searcher(folder, n_threads, progress).search(vector, n_hits)
    if as_json:
        print_json(_document(folder.manifest, query, hits))
    else:
        _print(hits)


def _document(manifest: Manifest, query: str, hits: list[Hit]) -> dict[str, Any]:
    found = [{"row": hit.row, "score": hit.score, "text": hit.text} for hit in hits]
    return {"query": query, "index": vars(manifest), "results": found}


def _print(hits: list[Hit]) -> None:
    from krafla_cli.formats.text import printable

    click.echo(f"{'score':>7} {'row':>9}  text")
    for hit in hits:
        click.echo(f"{hit.score:+7.4f} {hit.row:>9}  {printable(hit.text, 100)}")
