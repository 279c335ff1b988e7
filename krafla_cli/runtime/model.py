"""A model that is ready to run: its file, an engine, its tokenizer and settings. What ``open_model`` returns."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from krafla_cli.errors import FileError, InputError, UsageError
from krafla_cli.formats.mlb import Header
from krafla_cli.formats.mlb_file import MlbFile, open_mlb
from krafla_cli.formats.sidecar import is_of_another, sidecar_path
from krafla_cli.formats.text import printable
from krafla_cli.progress import SILENT, Progress
from krafla_cli.runtime.companions import Companions, end_of_text, find_companions, open_tokenizer
from krafla_cli.runtime.engine import Engine, EngineOptions, Float32s
from krafla_cli.runtime.engines import open_engine
from krafla_cli.runtime.generation import Generation, LogitsSink, generate, logits_of, prefill
from krafla_cli.runtime.sampling import Sampler, SamplingOptions, resolve

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from krafla_cli.tokenizer import ChatEncoder

DEFAULT_CTX = 4096


class Model:
    """An open model.

    ``config`` is the header; ``engine`` holds one sequence, which every call of :meth:`logits` and :meth:`generate`
    starts anew.
    """

    def __init__(self, file: MlbFile, engine: Engine, companions: Companions) -> None:
        self.file = file
        self.engine = engine
        self.companions = companions

    @property
    def config(self) -> Header:
        return self.file.header

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the model. Raises FileError naming the paths tried when there is none."""
        path = self.companions.tokenizer
        if path is None:
            raise FileError(self.companions.no_tokenizer)
        return open_tokenizer(path, self.config.vocab)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a generation: those of the settings, else the EOS of a .mlt; and the template's turn end."""
        settings = self.companions.settings
        ids = frozenset(settings.stop_ids) if settings else end_of_text(self.companions.tokenizer)
        if self.chat_template is None or self.companions.tokenizer is None:
            return ids
        return ids | self.chat_encoder.turn_end_ids()

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """What the model's makers recommend, by the names of SamplingOptions."""
        return self.companions.settings.sampling if self.companions.settings else {}

    @property
    def chat_template(self) -> str | None:
        """The chat template in effect: one that was chosen, else that of the settings."""
        return self.companions.chat_template

    @cached_property
    def chat_encoder(self) -> ChatEncoder:
        """Encodes conversations. Raises UsageError where there is no chat template, FormatError where it is none."""
        from krafla_cli.tokenizer import ChatEncoder
        from krafla_cli.tokenizer.templates import NAMES

        if self.chat_template is None:
            raise UsageError(f"the model has no chat template; give one with --template FILE, or {', '.join(NAMES)}")
        return ChatEncoder(self.tokenizer, self.chat_template, self.companions.special_tokens)

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of a conversation through the chat template; ``variables`` are the template's.

        Raises UsageError (no template), InputError, FormatError (see ChatEncoder.encode).
        """
        return self.chat_encoder.encode(messages, add_generation_prompt, **variables)

    def encode(self, prompt: str, raw: bool = False) -> list[int]:
        """The ids of ``prompt`` as one user turn of the model's chat template, or as it is (``raw``, or no template).

        Raises InputError for an empty prompt, or one that is no text.
        """
        if not prompt:
            raise InputError("the prompt is empty")
        if any("\ud800" <= c <= "\udfff" for c in prompt):  # what Python makes of arguments that are no UTF-8
            raise InputError("the prompt is not UTF-8 text")
        if raw or self.chat_template is None:
            ids: list[int] = self.tokenizer.encode(prompt).ids
            return ids
        return self.encode_messages([{"role": "user", "content": prompt}])

    def encode_text(self, text: str) -> tuple[list[int], list[int]]:
        """A long text for windows: the ids that the tokenizer puts before a text (BOS, or none), and the text's own."""
        first = self.tokenizer.encode("a")
        n_start = next((i for i, special in enumerate(first.special_tokens_mask) if not special), 0)
        return first.ids[:n_start], self.tokenizer.encode(text, add_special_tokens=False).ids

    def logits(self, ids: Sequence[int]) -> Float32s:
        """float32 logits [len(ids), vocab] of every position of ``ids``. Raises InputError (see Engine.forward)."""
        return logits_of(self.engine, ids)

    def generate(
        self,
        prompt: str,
        max_tokens: int | None = None,
        *,
        raw: bool = False,
        seed: int | None = None,
        sampling: SamplingOptions | None = None,
        stops: Sequence[str] = (),
    ) -> Iterator[str]:
        """Yields the answer to ``prompt`` as text, in pieces of whole characters.

        Ends at a stop id, before one of the texts ``stops``, after ``max_tokens``, or when the context is full.
        ``sampling``: the model's defaults when None. Raises InputError for a prompt that is empty or too long.
        """
        sampler = Sampler(sampling or resolve(self.sampling_defaults, {}), seed)
        ids = self.encode(prompt, raw)
        is_continued = raw or self.chat_template is None
        yield from self.text(self.run(ids, sampler, Generation(), max_tokens), is_continued, stops)

    def run(
        self,
        ids: Sequence[int],
        sampler: Sampler,
        report: Generation,
        max_tokens: int | None = None,
        *,
        ignore_eos: bool = False,
        sink: LogitsSink | None = None,
        progress: Progress = SILENT,
    ) -> Iterator[int]:
        """Runs the prompt ``ids`` and yields the generated ids; ``report`` is filled in on the way.

        ``sink`` is given the logits of the prompt; ``ignore_eos`` goes on after stop ids. Raises InputError as
        :func:`~krafla_cli.runtime.generation.prefill`.
        """
        started = time.perf_counter()
        report.prompt_tokens = len(ids)
        self.engine.reset()
        logits = prefill(self.engine, ids, sink, progress)
        report.prefill_seconds = time.perf_counter() - started
        stop_ids = frozenset() if ignore_eos else self.stop_ids
        yield from generate(self.engine, logits, sampler, report, max_tokens, stop_ids)

    def text(
        self,
        ids: Iterable[int],
        is_continued: bool = False,
        stops: Sequence[str] = (),
        report: Generation | None = None,
    ) -> Iterator[str]:
        """The text of ``ids`` while they come, in pieces of whole characters, without control tokens.

        ``is_continued``: it goes on with the prompt's text, so that a leading space is one and not the mark of a first
        word that SentencePiece tokenizers write. The text ends before the first of ``stops``; ``report`` is told.
        """
        from krafla_cli.tokenizer import StopText

        stop = StopText(stops)
        for piece in self._pieces(ids, is_continued):
            if shown := stop.push(piece):
                yield shown
            if stop.found is not None:
                if report is not None:
                    report.stop_reason, report.stop_text = "stop", stop.found
                return
        if rest := stop.flush():
            yield rest

    def _pieces(self, ids: Iterable[int], is_continued: bool) -> Iterator[str]:
        from krafla_cli.tokenizer import StreamDecoder

        decoder = StreamDecoder(self.tokenizer, skip_special_tokens=True, continuation=is_continued)
        for token_id in ids:
            if piece := decoder.push(token_id):
                yield piece
        if rest := decoder.flush():
            yield rest


def open_model(
    path: str | os.PathLike[str],
    device: str = "cpu",
    engine: str | None = None,
    *,
    n_ctx: int | None = None,
    default_ctx: int = DEFAULT_CTX,
    activations: str | None = None,
    kv: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    template: str | None = None,
    progress: Progress = SILENT,
) -> Model:
    """Opens a .mlb to run it on ``device`` with ``engine`` ("fast", "reference"; None: fast on a CPU).

    ``n_ctx``: positions of the context, by default the model's, at most ``default_ctx``. Options that are None have the
    engine's default. ``template``: a built-in chat template or a file, in place of the model's. Raises FileError,
    FormatError, ShapeError (a broken file), UsageError, InputError (impossible options).

    >>> model = krafla_cli.open_model("demo.mlb", engine="reference")
    >>> "".join(model.generate("Tell me a story about a cat.", 8, seed=2))
    'Once upon a time, a quiet cat'
    >>> model.logits([1, 5, 7]).shape == (3, model.config.vocab)
    True
    """
    file = open_mlb(path)
    companions = find_companions(path, tokenizer, template)
    settings = companions.settings
    if settings is not None and is_of_another(settings, path):
        progress.warn(f"{printable(str(sidecar_path(path)))} is of another model: its SHA-256 is not this file's")
    n_ctx = min(file.header.max_seq, default_ctx) if n_ctx is None else n_ctx
    options = EngineOptions(n_ctx, activations, kv, threads, device, dtype)
    return Model(file, open_engine(file, options, engine, progress), companions)
