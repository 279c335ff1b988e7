"""``mlb run``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from krafla_cli.cli.common import (
    FILE_PATH,
    TerminalProgress,
    common_options,
    engine_options,
    force_option,
    json_option,
    note,
    open_pool,
    print_json,
    ray_options,
    speed,
    text_files_option,
)

if TYPE_CHECKING:
    from krafla_cli.formats.mli import Imatrix
    from krafla_cli.runtime.generation import Generation, LogitsSink
    from krafla_cli.runtime.imatrix import WindowRecorder
    from krafla_cli.runtime.model import Model
    from krafla_cli.runtime.sampling import Sampler

# Those of krafla_cli.tokenizer.templates, which is imported only where one is used.
_TEMPLATES = ("chatml", "llama3", "gemma", "mistral", "smollm", "qwen3.5")


@click.command("run")
@click.argument("model", type=FILE_PATH)
@click.option("-p", "--prompt", "turn", help="One user turn, through the model's chat template where it has one.")
@text_files_option("Raw text: a file, a pipe, or - (stdin); a glob, or again: one text of all.")
@click.option("--prompt-ids", "prompt_ids", metavar="1,5,7", help="Token ids instead of text.")
@click.option("--chat", is_flag=True, help="A conversation in the terminal; /help there shows its commands.")
@click.option("--system", metavar="TEXT", help="System message, before the first turn.")
@click.option("--template", metavar="NAME|FILE", help=f"Chat template: a file, or {', '.join(_TEMPLATES)}.")
@click.option("--no-think", is_flag=True, help="No thinking, where the chat template has a switch for it.")
@click.option("--raw", is_flag=True, help="No chat template: -p is text to go on with.")
@click.option("-n", "--max-tokens", type=click.IntRange(0), help="Most tokens to generate [default: no limit].")
@click.option("--temp", type=float, help="Temperature; 0: always the likeliest token.")
@click.option("--top-k", type=int, help="Only the K likeliest tokens; 0: all.")
@click.option("--top-p", type=float, help="Only the likeliest tokens that have this share together.")
@click.option("--min-p", type=float, help="Only tokens with this share of the likeliest one's probability.")
@click.option("--repeat-penalty", type=float, help="Makes tokens that were there before less likely; 1: off.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), help="Repeats a run [default: another each time].")
@click.option("--stop", "stops", multiple=True, metavar="TEXT", help="End before TEXT; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's stop tokens.")
@click.option("--logits", "logits_path", type=FILE_PATH, help="Write the prompt's logits as .npy.")
@click.option("--imatrix", type=FILE_PATH, help="Record an importance matrix (MLI1) of the text.")
@click.option("--append", is_flag=True, help="Add to the importance matrix that is there.")
@click.option("--no-logits", is_flag=True, help="Record without the classifier: faster.")
@click.option("--stats", is_flag=True, help="Show speeds on stderr.")
@ray_options
@engine_options("the model's, up to 4096; with --imatrix 512")
@force_option
@json_option
@common_options
def command(**options: Any) -> None:
    """Generate text with a .mlb model. Its tokenizer and settings lie beside it: X.mlt or X.tokenizer.json, X.json.

    \b
    mlb run model.mlb -p "hi"                       one turn through the chat template
    mlb run model.mlb -p "Once upon" --raw -n 50    goes on with the text
    mlb run model.mlb --chat --system "Be brief."    a conversation
    mlb run model.mlb -f text.txt --imatrix imat.mli
    mlb run model.mlb --prompt-ids 1,5,7 --logits out.npy

    With --logits and --imatrix nothing is generated unless -n asks for it. --imatrix runs the text in windows of --ctx
    positions, each from an empty context.
    """
    _Command(**options).run()


@dataclass(frozen=True)
class _Command:
    """The options as given, by the names of their parameters."""

    model: Path
    turn: str | None
    files: tuple[Path, ...]
    prompt_ids: str | None
    chat: bool
    system: str | None
    template: str | None
    no_think: bool
    raw: bool
    max_tokens: int | None
    temp: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    seed: int | None
    stops: tuple[str, ...]
    ignore_eos: bool
    logits_path: Path | None
    imatrix: Path | None
    append: bool
    no_logits: bool
    stats: bool
    ray: str | None
    workers: int | None
    n_ctx: int | None
    engine: str | None
    activations: str | None
    kv: str | None
    threads: int | None
    device: str
    dtype: str | None
    tokenizer: str | None
    force: bool
    as_json: bool

    def run(self) -> None:
        """Checks the options, then records or generates."""
        self._check()
        progress = TerminalProgress()
        if self.imatrix is not None:
            self._record(self.imatrix, progress)
        elif self.chat:
            self._chat(progress)
        else:
            self._generate(progress)

    def _check(self) -> None:
        """Everything that can be refused before the model is opened."""
        from krafla_cli.formats.atomic import check_target
        from krafla_cli.runtime.sampling import resolve

        if sum(p is not None for p in (self.turn, self.files or None, self.prompt_ids)) + self.chat != 1:
            raise click.UsageError("give one of -p TEXT, -f FILE and --prompt-ids IDS, or --chat")
        self._check_chat()
        if "" in self.stops:
            raise click.UsageError("--stop needs a text")
        if self.imatrix is None and (self.append or self.no_logits):
            raise click.UsageError("--append and --no-logits are for --imatrix")
        if self.imatrix is None and (self.ray is not None or self.workers is not None):
            raise click.UsageError("--ray and --workers are for --imatrix")
        if self.imatrix is not None and self.logits_path is not None:
            raise click.UsageError("--imatrix and --logits are two runs")
        if self.logits_path is not None:
            check_target(self.logits_path, self.force, self._inputs)
        if self.imatrix is not None:
            check_target(self.imatrix, self.force or self.append, self._inputs)
        resolve({}, self._sampling)

    @property
    def _inputs(self) -> tuple[Path, ...]:
        """Files that are read, and so never written over: the model, what lies beside it, texts and tokenizers."""
        from krafla_cli.formats.sidecar import files_beside
        from krafla_cli.globs import expand

        given = (*expand([str(f) for f in self.files]), *([Path(self.tokenizer)] if self.tokenizer else []))
        return (self.model, *files_beside(self.model), *given)

    def _check_chat(self) -> None:
        others = (self.raw, self.ignore_eos, self.as_json, self.imatrix is not None, self.logits_path is not None)
        if self.chat and any(others):
            raise click.UsageError("--chat goes without --raw, --ignore-eos, --json, --imatrix and --logits")
        if self._is_turn_in_template:
            return
        if self.system is not None or self.template is not None or self.no_think:
            raise click.UsageError("--system, --template and --no-think are for --chat, and for -p without --raw")

    @property
    def _is_turn_in_template(self) -> bool:
        return self.chat or (self.turn is not None and not self.raw)

    @property
    def _sampling(self) -> dict[str, float]:
        """The sampling options that were given, by the names of SamplingOptions."""
        chosen = {
            "temperature": self.temp,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
        }
        return {name: value for name, value in chosen.items() if value is not None}

    def _open(self, progress: TerminalProgress, default_ctx: int = 4096) -> Model:
        from krafla_cli.runtime.model import open_model

        return open_model(self.model, default_ctx=default_ctx, **self._engine_options, progress=progress)

    @property
    def _engine_options(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "engine": self.engine,
            "n_ctx": self.n_ctx,
            "activations": self.activations,
            "kv": self.kv,
            "threads": self.threads,
            "dtype": self.dtype,
            "tokenizer": self.tokenizer,
            "template": self.template,
        }

    # -----------------------------------------------------------------------------------------------------------------
    # Generating

    def _generate(self, progress: TerminalProgress) -> None:
        started = time.perf_counter()
        model = self._open(progress)
        ids = self._encode(model)
        load_seconds = time.perf_counter() - started
        limit = 0 if self.max_tokens is None and self.logits_path is not None else self.max_tokens
        self._generate_after(model, ids, limit, load_seconds, progress)

    def _generate_after(
        self, model: Model, ids: list[int], limit: int | None, load_seconds: float, progress: TerminalProgress
    ) -> None:
        from krafla_cli.runtime.generation import Generation
        from krafla_cli.runtime.sampling import Sampler, resolve

        sampler = Sampler(resolve(model.sampling_defaults, self._sampling), self.seed)
        run = _Run(model, sampler, Generation(), load_seconds)
        with _logits_sink(self.logits_path, len(ids), model, self.force) as sink:
            generated = model.run(
                ids, sampler, run.report, limit, ignore_eos=self.ignore_eos, sink=sink, progress=progress
            )
            is_continued = self.turn is None or self.raw or model.chat_template is None
            text = self._consume(model, ids, generated, is_continued, run.report)
        if self.as_json:
            print_json(_document(run, text))
        if run.report.stop_reason == "context":
            note(f"the context of {model.engine.n_ctx} positions is full")
        if self.stats:
            click.echo(_stats(run), err=True)

    def _consume(
        self, model: Model, prompt: list[int], generated: Iterable[int], is_continued: bool, report: Generation
    ) -> str | None:
        """Runs the generation, showing its text while it comes; None where no tokenizer can turn ids into text."""
        if model.companions.tokenizer is None and not self.stops:
            ids = ",".join(str(i) for i in generated)
            if ids and not self.as_json:
                click.echo(ids)
            return None
        pieces = model.text(generated, is_continued, self.stops, report)
        if self.as_json:
            return "".join(pieces)
        from krafla_cli.cli.chat import ReplyPrinter
        from krafla_cli.runtime.chat import mark_thinking, opens_thinking

        return ReplyPrinter().show(mark_thinking(pieces, opens_thinking(model.tokenizer, prompt)))

    def _chat(self, progress: TerminalProgress) -> None:
        from krafla_cli.cli.chat import Session
        from krafla_cli.runtime.chat import Chat, template_variables
        from krafla_cli.runtime.sampling import Sampler, resolve

        model = self._open(progress)
        chat = Chat(
            model,
            Sampler(resolve(model.sampling_defaults, self._sampling), self.seed),
            self.max_tokens,
            system=self.system or "",
            stops=self.stops,
            variables=template_variables(model, self.no_think),
            progress=progress,
        )
        Session(chat, self.force, self.stats).run()

    def _encode(self, model: Model) -> list[int]:
        from krafla_cli.runtime.prompt import read_texts
        from krafla_cli.tokenizer.ids import parse_ids

        if self.prompt_ids is not None:
            return parse_ids(self.prompt_ids, "--prompt-ids")
        if self.files:
            return model.encode(read_texts(self.files), raw=True)
        if model.companions.settings is None and self.template is None and not self.raw:
            note(model.companions.no_settings)
        if not self.system and not self.no_think:
            return model.encode(self.turn or "", self.raw)
        from krafla_cli.runtime.chat import conversation, template_variables

        variables = template_variables(model, self.no_think)
        return model.encode_messages(conversation(model, self.turn or "", self.system or "", variables), **variables)

    # -----------------------------------------------------------------------------------------------------------------
    # Recording an importance matrix

    def _record(self, target: Path, progress: TerminalProgress) -> None:
        from krafla_cli.formats.mli import Dimensions, Imatrix, write
        from krafla_cli.formats.text import counted, printable
        from krafla_cli.runtime.imatrix import DEFAULT_WINDOW, read_previous, record_windows, windows

        started = time.perf_counter()
        with open_pool(self.ray, self.workers, self.threads, progress) as pool:
            model = self._open(progress, DEFAULT_WINDOW)
            width = model.engine.n_ctx
            previous = read_previous(target, model.config) if self.append else None
            imatrix = previous or Imatrix.empty(Dimensions.of(model.config))
            start, ids = self._encode_for_windows(model)
            parts = list(windows(ids, width, start))
            load_seconds = time.perf_counter() - started
            speeds = record_windows(pool, self._recorder(model), parts, imatrix, progress)
        write(imatrix, target, self.force or self.append)
        n_tokens = counted(imatrix.layer_tokens, "token")
        note(f"wrote {printable(str(target))}: {n_tokens}, {imatrix.classifier_tokens:,} of them in the classifier")
        if self.ray is not None:
            note(speeds.text("tok"))
        if self.max_tokens:
            self._generate_after(model, parts[-1], self.max_tokens, load_seconds, progress)
        elif self.as_json:
            print_json(_imatrix_document(imatrix, target, load_seconds, time.perf_counter() - started))

    def _recorder(self, model: Model) -> Callable[[], WindowRecorder]:
        """Opens a worker: around the model that is open, or on a cluster the model once more."""
        from krafla_cli.runtime.imatrix import WindowRecorder
        from krafla_cli.runtime.workers import open_recorder

        if self.ray is None:
            return lambda: WindowRecorder(model.engine, not self.no_logits)
        options = self._engine_options | {"n_ctx": model.engine.n_ctx, "threads": self.threads or 1, "template": None}
        options["tokenizer"] = self.tokenizer and str(Path(self.tokenizer).absolute())
        path = self.model.absolute()
        return partial(open_recorder, path, path.stat().st_size, not self.no_logits, options)

    def _encode_for_windows(self, model: Model) -> tuple[list[int], list[int]]:
        """The ids that start each window, and those of the text."""
        from krafla_cli.runtime.prompt import read_texts

        if self.files:
            return model.encode_text(read_texts(self.files))
        return [], self._encode(model)


@dataclass(frozen=True)
class _Run:
    """Everything that is told about a generation afterwards."""

    model: Model
    sampler: Sampler
    report: Generation
    load_seconds: float


@contextlib.contextmanager
def _logits_sink(path: Path | None, n_positions: int, model: Model, force: bool) -> Iterator[LogitsSink | None]:
    if path is None:
        yield None
        return
    from krafla_cli.formats.npy import float32_rows

    with float32_rows(path, n_positions, model.config.vocab, force, (Path(model.file.path),)) as sink:
        yield sink


def _document(run: _Run, text: str | None) -> dict[str, Any]:
    report, engine = run.report, run.model.engine
    return {
        "text": text,
        "ids": report.ids,
        "prompt_tokens": report.prompt_tokens,
        "generated_tokens": len(report.ids),
        "stop_reason": report.stop_reason,
        "stop_id": report.stop_id,
        "stop_text": report.stop_text,
        "seed": run.sampler.seed,
        "engine": engine.name,
        "activations": engine.activations,
        "kv": engine.kv,
        "load_seconds": run.load_seconds,
        "prefill_seconds": report.prefill_seconds,
        "decode_seconds": report.decode_seconds,
    }


def _imatrix_document(imatrix: Imatrix, target: Path, load_seconds: float, seconds: float) -> dict[str, Any]:
    return {
        "output": str(target),
        "layer_tokens": imatrix.layer_tokens,
        "classifier_tokens": imatrix.classifier_tokens,
        "load_seconds": load_seconds,
        "record_seconds": seconds - load_seconds,
    }


def _stats(run: _Run) -> str:
    report, engine = run.report, run.model.engine
    parts = [
        f"load {run.load_seconds:.2f} s",
        speed("prompt", report.prompt_tokens, report.prefill_seconds),
        speed("generated", len(report.ids), report.decode_seconds),
        f"{engine.name} engine, {engine.activations} activations, {engine.kv} cache",
        f"seed {run.sampler.seed}",
        f"ended by {report.stop_reason}",
    ]
    return "; ".join(parts)
