"""``mlb run``."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from krafla_cli.cli.common import (
    TerminalProgress,
    common_options,
    engine_options,
    force_option,
    json_option,
    note,
    print_json,
)

if TYPE_CHECKING:
    from krafla_cli.runtime.generation import Generation, LogitsSink
    from krafla_cli.runtime.model import Model
    from krafla_cli.runtime.sampling import Sampler

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class _Prompt:
    """What the options say to run; exactly one of the three."""

    turn: str | None
    file: Path | None
    ids: str | None


@click.command("run")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", "turn", help="One user turn, through the model's chat template where it has one.")
@click.option("-f", "--file", "file", type=click.Path(path_type=Path), help="Raw text: a file, a pipe, or - (stdin).")
@click.option("--prompt-ids", "prompt_ids", metavar="1,5,7", help="Token ids instead of text.")
@click.option("--raw", is_flag=True, help="No chat template: -p is text to go on with.")
@click.option("-n", "--max-tokens", type=click.IntRange(0), help="Most tokens to generate [default: no limit].")
@click.option("--temp", type=float, help="Temperature; 0: always the likeliest token.")
@click.option("--top-k", type=int, help="Only the K likeliest tokens; 0: all.")
@click.option("--top-p", type=float, help="Only the likeliest tokens that have this share together.")
@click.option("--min-p", type=float, help="Only tokens with this share of the likeliest one's probability.")
@click.option("--repeat-penalty", type=float, help="Makes tokens that were there before less likely; 1: off.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), help="Repeats a run [default: another each time].")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's stop tokens.")
@click.option("--logits", "logits_path", type=click.Path(path_type=Path), help="Write the prompt's logits as .npy.")
@click.option("--stats", is_flag=True, help="Show speeds on stderr.")
@engine_options
@force_option
@json_option
@common_options
def command(
    model: Path,
    turn: str | None,
    file: Path | None,
    prompt_ids: str | None,
    raw: bool,
    max_tokens: int | None,
    temp: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repeat_penalty: float | None,
    seed: int | None,
    ignore_eos: bool,
    logits_path: Path | None,
    stats: bool,
    force: bool,
    as_json: bool,
    **engine: Any,
) -> None:
    """Generate text with a .mlb model. Its tokenizer and settings lie beside it: X.mlt or X.tokenizer.json, X.json.

    \b
    mlb run model.mlb -p "hi"                       one turn through the chat template
    mlb run model.mlb -p "Once upon" --raw -n 50    goes on with the text
    mlb run model.mlb --prompt-ids 1,5,7 --logits out.npy

    With --logits nothing is generated unless -n asks for it.
    """
    from krafla_cli.formats.atomic import check_target
    from krafla_cli.runtime.generation import Generation
    from krafla_cli.runtime.model import open_model
    from krafla_cli.runtime.sampling import Sampler, resolve

    started = time.perf_counter()
    prompt = _checked(_Prompt(turn, file, prompt_ids))
    if logits_path is not None:
        check_target(logits_path, force, (model,))
    progress = TerminalProgress()
    chosen = {"temperature": temp, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repeat_penalty}
    given = {name: value for name, value in chosen.items() if value is not None}
    resolve({}, given)
    opened = open_model(model, progress=progress, **engine)
    sampler = Sampler(resolve(opened.sampling_defaults, given), seed)
    ids = _encode(opened, prompt, raw)
    run = _Run(opened, sampler, Generation(), time.perf_counter() - started)

    limit = 0 if max_tokens is None and logits_path is not None else max_tokens
    with _logits_sink(logits_path, len(ids), opened, force) as sink:
        generated = opened.run(ids, sampler, run.report, limit, ignore_eos=ignore_eos, sink=sink, progress=progress)
        text = _consume(opened, generated, show=not as_json)
    if as_json:
        print_json(_document(run, text))
    if run.report.stop_reason == "context":
        note(f"the context of {opened.engine.n_ctx} positions is full")
    if stats:
        click.echo(_stats(run), err=True)


@dataclass(frozen=True)
class _Run:
    """Everything that is told about a run afterwards."""

    model: Model
    sampler: Sampler
    report: Generation
    load_seconds: float


def _checked(prompt: _Prompt) -> _Prompt:
    given = [p for p in (prompt.turn, prompt.file, prompt.ids) if p is not None]
    if len(given) != 1:
        raise click.UsageError("give one of -p TEXT, -f FILE and --prompt-ids IDS")
    return prompt


def _encode(model: Model, prompt: _Prompt, raw: bool) -> list[int]:
    from krafla_cli.runtime.prompt import parse_ids, read_text

    if prompt.ids is not None:
        return parse_ids(prompt.ids)
    if prompt.file is not None:
        return model.encode(read_text(prompt.file), raw=True)
    if model.companions.settings is None and not raw:
        note(model.companions.no_settings)
    return model.encode(prompt.turn or "", raw)


@contextlib.contextmanager
def _logits_sink(path: Path | None, n_positions: int, model: Model, force: bool) -> Iterator[LogitsSink | None]:
    if path is None:
        yield None
        return
    from krafla_cli.formats.npy import float32_rows

    with float32_rows(path, n_positions, model.config.vocab, force, (Path(model.file.path),)) as sink:
        yield sink


def _consume(model: Model, generated: Iterable[int], show: bool) -> str | None:
    """Runs the generation, showing its text while it comes; None where no tokenizer can turn ids into text."""
    if model.companions.tokenizer is None:
        ids = ",".join(str(i) for i in generated)
        if show and ids:
            click.echo(ids)
        return None
    text = ""
    for piece in model.text(generated):
        text += piece
        if show:
            click.echo(_for_terminal(piece) if sys.stdout.isatty() else piece, nl=False)
    if show and text:
        click.echo()
    return text


def _for_terminal(text: str) -> str:
    """Control characters written out: a model is a stranger's file and must not steer the terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _document(run: _Run, text: str | None) -> dict[str, Any]:
    report, engine = run.report, run.model.engine
    return {
        "text": text,
        "ids": report.ids,
        "prompt_tokens": report.prompt_tokens,
        "generated_tokens": len(report.ids),
        "stop_reason": report.stop_reason,
        "stop_id": report.stop_id,
        "seed": run.sampler.seed,
        "engine": engine.name,
        "activations": engine.activations,
        "kv": engine.kv,
        "load_seconds": run.load_seconds,
        "prefill_seconds": report.prefill_seconds,
        "decode_seconds": report.decode_seconds,
    }


def _stats(run: _Run) -> str:
    report, engine = run.report, run.model.engine
    parts = [
        f"load {run.load_seconds:.2f} s",
        _speed("prompt", report.prompt_tokens, report.prefill_seconds),
        _speed("generated", len(report.ids), report.decode_seconds),
        f"{engine.name} engine, {engine.activations} activations, {engine.kv} cache",
        f"seed {run.sampler.seed}",
        f"ended by {report.stop_reason}",
    ]
    return "; ".join(parts)


def _speed(what: str, n_tokens: int, seconds: float) -> str:
    rate = f" ({n_tokens / seconds:.1f} tok/s)" if seconds > 0 else ""
    return f"{what} {n_tokens} tokens in {seconds:.2f} s{rate}"
