"""``mlb eval``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from krafla_cli.cli.common import (
    FILE_PATH,
    TerminalProgress,
    common_options,
    engine_options,
    json_option,
    open_pool,
    print_json,
    ray_options,
    text_files_option,
)
from krafla_cli.progress import SILENT

if TYPE_CHECKING:
    from krafla_cli.progress import Progress
    from krafla_cli.runtime.engine import Engine
    from krafla_cli.runtime.evaluation import Score, Window, WindowScorer
    from krafla_cli.runtime.model import Model

_DEFAULT_WINDOW = 512


@click.command("eval")
@click.argument("models", nargs=-1, required=True, type=FILE_PATH)
@text_files_option("Text: a file, a pipe, or -; a glob, or again: one text of all.", required=True)
@click.option("--baseline", type=FILE_PATH, help="Compare with this .mlb, folder or .gguf.")
@click.option(
    "--windows",
    "method",
    type=click.Choice(["sliding", "chunks"]),
    default="sliding",
    show_default=True,
    help="sliding: as transformers' guide, each token scored once; chunks: as llama-perplexity, second halves scored.",
)
@click.option("--stride", type=click.IntRange(1), help="How far sliding windows move on [default: half of --ctx].")
@click.option("--max-tokens", type=click.IntRange(2), help="Use only the first tokens of the text.")
@ray_options
@engine_options("512")
@json_option
@common_options
def command(
    models: tuple[Path, ...],
    files: tuple[Path, ...],
    baseline: Path | None,
    method: str,
    stride: int | None,
    max_tokens: int | None,
    n_ctx: int | None,
    as_json: bool,
    ray: str | None,
    workers: int | None,
    **engine: Any,
) -> None:
    """Perplexity of one or several models on a text, and their divergence from a baseline.

    \b
    mlb eval model.mlb -f text.txt
    mlb eval q8.mlb q4.mlb -f text.txt --baseline ./checkpoint

    Windows are --ctx positions wide. A --baseline that is a Hugging Face folder or a GGUF file
    runs on the reference engine in float32.
    """
    from krafla_cli.runtime.evaluation import evaluate_windows
    from krafla_cli.runtime.prompt import read_texts

    if stride is not None and method != "sliding":
        raise click.UsageError("--stride is for --windows sliding")
    progress = TerminalProgress()
    with open_pool(ray, workers, engine["threads"], progress) as pool:
        text = read_texts(files)
        opened = _open(models, n_ctx, engine, progress)
        width = min(model.engine.n_ctx for model in opened)
        if width < 2:
            raise click.UsageError("--ctx must be at least 2: a token is scored by those before it")
        windows = _windows(opened[0], text, method, width, stride or max(width // 2, 1), max_tokens)
        if ray is None:
            open_scorer = partial(_scorer, opened, baseline, width, engine, progress)
        else:
            open_scorer = partial(_scorer_elsewhere, *_for_workers(models, baseline, engine), width)
        scores = evaluate_windows(pool, open_scorer, windows, progress)
    names = [*models, *([baseline] if baseline is not None else [])]
    rows = [_row(path, score) for path, score in zip(names, scores, strict=True)]
    for row, model in zip(rows, opened, strict=False):
        row["bits_per_weight"] = model.file.bits_per_weight
    if as_json:
        settings = {"windows": method, "ctx": width, "stride": stride or max(width // 2, 1), "n_windows": len(windows)}
        print_json({**settings, "models": rows[: len(models)], "baseline": rows[-1] if baseline else None})
    else:
        _print(rows, has_baseline=baseline is not None)


def _open(paths: Sequence[Path], n_ctx: int | None, engine: dict[str, Any], progress: Progress) -> list[Model]:
    from krafla_cli.runtime.model import open_model

    return [open_model(path, n_ctx=n_ctx, default_ctx=_DEFAULT_WINDOW, progress=progress, **engine) for path in paths]


def _scorer(
    models: Sequence[Model], baseline: Path | None, width: int, engine: dict[str, Any], progress: Progress
) -> WindowScorer:
    from krafla_cli.runtime.evaluation import WindowScorer

    base = _open_baseline(baseline, width, engine, progress) if baseline is not None else None
    return WindowScorer([model.engine for model in models], base)


def _for_workers(
    models: Sequence[Path], baseline: Path | None, engine: dict[str, Any]
) -> tuple[list[tuple[Path, int]], Path | None, dict[str, Any]]:
    """Arguments for workers, which have another current folder: paths with their sizes, the baseline, options."""
    sizes = [(path.absolute(), path.stat().st_size) for path in models]
    tokenizer = engine["tokenizer"] and str(Path(engine["tokenizer"]).absolute())
    options = engine | {"threads": engine["threads"] or 1, "tokenizer": tokenizer}
    return sizes, baseline and baseline.absolute(), options


def _scorer_elsewhere(
    sizes: list[tuple[Path, int]], baseline: Path | None, engine: dict[str, Any], width: int
) -> WindowScorer:
    """The scorer, opened in a worker's process."""
    from krafla_cli.runtime.workers import open_same_model

    models = [open_same_model(path, n_bytes, {**engine, "n_ctx": width}) for path, n_bytes in sizes]
    return _scorer(models, baseline, width, engine, SILENT)


def _open_baseline(path: Path, n_ctx: int, engine: dict[str, Any], progress: Progress) -> Engine:
    """A .mlb as the models are opened; a folder or a GGUF file on the reference engine, its weights as they are."""
    from krafla_cli.formats.detect import detect
    from krafla_cli.runtime.engine import EngineOptions
    from krafla_cli.runtime.model import open_model

    is_checkpoint = path.is_dir() or (path.is_file() and detect(path).kind == "gguf")
    if not is_checkpoint:
        return open_model(path, n_ctx=n_ctx, progress=progress, **engine).engine
    from krafla_cli.convert.dense import open_dense
    from krafla_cli.runtime.reference import open_source
    from krafla_cli.runtime.weights import DenseWeights

    options = EngineOptions(n_ctx, "f32", "f32", engine["threads"], engine["device"], engine["dtype"])
    return open_source(DenseWeights(*open_dense(path)), options, progress)


def _windows(model: Model, text: str, method: str, width: int, stride: int, max_tokens: int | None) -> list[Window]:
    from krafla_cli.runtime.evaluation import chunk_windows, sliding_windows

    start, text_ids = model.encode_text(text)
    ids = [*start, *text_ids][:max_tokens]
    return sliding_windows(ids, width, stride) if method == "sliding" else chunk_windows(ids, width, start)


def _row(path: Path, score: Score) -> dict[str, Any]:
    row: dict[str, Any] = {"model": str(path), **asdict(score)}
    divergence = row.pop("divergence")
    return row | (divergence or {})


def _print(rows: list[dict[str, Any]], has_baseline: bool) -> None:
    from krafla_cli.report.tables import table

    columns = ["model", "bits/weight", "perplexity", "±"]
    keys = ["model", "bits_per_weight", "perplexity", "perplexity_error"]
    if has_baseline:
        columns += ["KL", "±", "KL 99 %", "top-1 %"]
        keys += ["kl", "kl_error", "kl_p99", "top1"]
    columns += ["tokens", "tok/s"]
    keys += ["n_tokens", "tokens_per_second"]
    for row in rows:
        row["top1"] = round(100 * row["top1_agreement"], 2) if "top1_agreement" in row else None
        row["tokens_per_second"] = round(row["tokens_per_second"], 1)
    for line in table(columns, [[row.get(key) for key in keys] for row in rows]):
        click.echo(line)
