"""What the subcommands share: the common options, output for machines, progress bars and remarks on stderr."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from krafla_cli.progress import Progress

if TYPE_CHECKING:
    from tqdm import tqdm

    from krafla_cli.pool import Pool

F = TypeVar("F", bound=Callable[..., Any])


class FilePath(click.Path):
    """A path. An empty one is refused: it would mean the current folder, which an unset variable should not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path as a pathlib.Path."""
        if value == "":
            self.fail("an empty path", param, ctx)
        return super().convert(value, param, ctx)


FILE_PATH = FilePath(path_type=Path)


@dataclass
class Verbosity:
    quiet: bool = False
    verbose: bool = False


def verbosity() -> Verbosity:
    """The verbosity asked for with --quiet and --verbose in the running command."""
    return click.get_current_context().ensure_object(Verbosity)


def _set_verbosity(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and param.name:
        setattr(ctx.ensure_object(Verbosity), param.name, True)


def common_options(command: F) -> F:
    """Adds --quiet, --verbose and --debug."""
    for decorate in (
        click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails."),
        click.option("--verbose", "-v", is_flag=True, expose_value=False, callback=_set_verbosity, help="Say more."),
        click.option("--quiet", "-q", is_flag=True, expose_value=False, callback=_set_verbosity, help="Only errors."),
    ):
        command = decorate(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, nothing else.")
force_option = click.option("--force", is_flag=True, help="Overwrite the output if it exists.")


def text_files_option(help_text: str, required: bool = False) -> Callable[[F], F]:
    """Adds -f FILE, any number of times, as ``files`` (empty when not given)."""
    return click.option("-f", "--file", "files", type=FILE_PATH, multiple=True, required=required, help=help_text)


def threads_option(default_text: str = "physical cores") -> Callable[[F], F]:
    """Adds --threads N (None when not given)."""
    return click.option("--threads", type=click.IntRange(1, 1024), help=f"Number of threads [default: {default_text}].")


def engine_options(default_ctx: str) -> Callable[[F], F]:
    """Adds what opening a model to run it takes, named as the arguments of ``open_model``."""

    def decorated(command: F) -> F:
        for decorate in (
            click.option("--tokenizer", type=FilePath(), help="A .mlt or tokenizer.json [default: beside the model]."),
            click.option(
                "--dtype",
                type=click.Choice(["f32", "f16", "bf16"]),
                help="Weights of the reference engine [default: f32; on another device than the CPU bf16 or f16].",
            ),
            click.option("--device", default="cpu", show_default=True, help="Torch device of the reference engine."),
            threads_option(),
            click.option("--kv", type=click.Choice(["f16", "f32"]), help="Cache type [default: f16; reference: f32]."),
            click.option(
                "--activations", type=click.Choice(["q8", "f32"]), help="Of products [default: q8; reference: f32]."
            ),
            click.option("--engine", type=click.Choice(["fast", "reference"]), help="[default: fast on a CPU]"),
            click.option("--ctx", "n_ctx", type=click.IntRange(1), help=f"Positions [default: {default_ctx}]."),
        ):
            command = decorate(command)
        return command

    return decorated


def _check_address(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuses what is no address of a cluster, such as a file name that follows a bare --ray."""
    if value is not None and not re.fullmatch(r"local|auto|[\w.-]+:\d{1,5}", value):
        raise click.BadParameter(f"{value!r} is neither HOST:PORT nor auto nor local; write a bare --ray last")
    return value


def ray_options(command: F) -> F:
    """Adds --ray [ADDRESS] (None when not given) and --workers N."""
    for decorate in (
        click.option("--workers", type=click.IntRange(1), help="With --ray: workers [default: as processors allow]."),
        click.option(
            "--ray",
            callback=_check_address,
            metavar="[ADDRESS]",
            is_flag=False,
            flag_value="local",
            help="Work on a Ray cluster: HOST:PORT, auto, or one on this machine. --threads are each worker's, 1.",
        ),
    ):
        command = decorate(command)
    return command


@contextlib.contextmanager
def open_pool(ray: str | None, workers: int | None, threads: int | None, progress: Progress) -> Iterator[Pool]:
    """The workers that --ray and --workers ask for; without --ray, this process."""
    if ray is None:
        from krafla_cli.pool import LocalPool

        if workers is not None:
            raise click.UsageError("--workers goes with --ray")
        yield LocalPool()
        return
    from krafla_cli.cluster import ray_pool

    with ray_pool(ray, workers, threads or 1, progress) as pool:
        yield pool


def print_json(document: Any) -> None:
    """Prints ``document`` as the one JSON document on stdout. NaN and infinities become null: JSON has none."""
    click.echo(json.dumps(_finite(document), indent=2, ensure_ascii=True))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def note(text: str) -> None:
    """A line for people, on stderr; not with --quiet."""
    if not verbosity().quiet:
        click.echo(text, err=True)


def speed(what: str, n_tokens: int, seconds: float) -> str:
    """How long ``n_tokens`` took, for a line of statistics."""
    from krafla_cli.formats.text import counted

    rate = f" ({n_tokens / seconds:.1f} tok/s)" if seconds > 0 else ""
    return f"{what} {counted(n_tokens, 'token')} in {seconds:.2f} s{rate}"


class TerminalProgress(Progress):
    """Bars (after a second, on a terminal only) and remarks on stderr."""

    def __init__(self) -> None:
        self._verbosity = verbosity()
        self._bar: tqdm[Any] | None = None

    def start(self, what: str, total: int, unit: str) -> None:
        if self._verbosity.quiet or not sys.stderr.isatty():
            return
        from tqdm import tqdm

        self._bar = tqdm(
            total=total,
            desc=what,
            unit=unit,
            unit_scale=True,
            delay=1.0,
            file=sys.stderr,
            leave=False,
            dynamic_ncols=True,
        )

    def advance(self, n: int) -> None:
        if self._bar is not None:
            self._bar.update(n)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def info(self, text: str) -> None:
        if not self._verbosity.quiet:
            self._write(text)

    def detail(self, text: str) -> None:
        if self._verbosity.verbose:
            self._write(text)

    def warn(self, text: str) -> None:
        if not self._verbosity.quiet:
            self._write(f"mlb: warning: {text}")

    def _write(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        click.echo(text, err=True)
