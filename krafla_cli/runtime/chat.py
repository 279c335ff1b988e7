"""A conversation over the engine contract: turns, what of the cache each turn can keep, and thinking in replies.

Every turn encodes the whole conversation anew and runs what differs from the ids that the engine holds. So the engine
sees exactly the ids of the template, also where the template rewrites the past (it leaves old thinking out) or the
reply's text is encoded in other tokens than those that were drawn.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from krafla_cli.errors import InputError, UsageError
from krafla_cli.progress import SILENT, Progress
from krafla_cli.runtime.engine import Engine, Float32s, Snapshot
from krafla_cli.runtime.generation import Generation, generate, prefill
from krafla_cli.runtime.sampling import Sampler

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from krafla_cli.runtime.model import Model

Message = dict[str, str]

THINK, END_THINK = "<think>", "</think>"
# Ids at the end of a prompt that may hold an opened thinking block: the tag, in several tokens, and line ends.
_TAIL = 12
# A recurrent state is large, and templates rewrite the last turns only.
_MAX_SNAPSHOTS = 4
# Ids that are run between two looks at whether the user has had enough.
_BATCH = 128


class Piece(NamedTuple):
    """A part of a reply's text."""

    text: str
    is_thinking: bool


class Chat:
    """One conversation with ``model``; ``messages`` are its finished turns, the system message first.

    ``report`` is about the last reply. ``variables`` go to the chat template (see :func:`template_variables`).
    Raises FileError (no tokenizer), UsageError (no chat template), InputError (see :func:`check_system`).
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        max_tokens: int | None = None,
        *,
        system: str = "",
        stops: Sequence[str] = (),
        variables: Mapping[str, Any] | None = None,
        progress: Progress = SILENT,
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.report = Generation()
        self.messages: list[Message] = []
        self._max_tokens = max_tokens
        self._stops = tuple(stops)
        self._variables = dict(variables or {})
        self._cache = PromptCache(model.engine)
        self._progress = _Interruptible(progress)
        self._stop_ids = model.stop_ids
        self._encode([{"role": "user", "content": "a"}])  # what cannot work is told before the first turn
        self.set_system(system)

    @property
    def system(self) -> str:
        """The system message, "" where there is none."""
        return next((m["content"] for m in self.messages if m["role"] == "system"), "")

    def set_system(self, text: str) -> None:
        """Replaces the system message ("": none); the conversation stays. Raises InputError (:func:`check_system`)."""
        check_system(self.model, text, self._variables)
        turns = [m for m in self.messages if m["role"] != "system"]
        self.messages = _system(text) + turns

    def reset(self) -> None:
        """Forgets all turns; the system message stays."""
        self.messages = _system(self.system)

    def interrupt(self) -> None:
        """Ends the running reply after the present step; safe in a signal handler."""
        self._progress.is_interrupted = True

    def reply(self, text: str) -> Iterator[Piece]:
        """Yields the reply to ``text`` as it comes, and then adds both to ``messages``.

        A reply that is interrupted stays in the conversation as far as it came; one of which nothing came does not, nor
        does its question. Raises InputError: no text, or a conversation longer than the context; nothing is changed.
        """
        self._progress.is_interrupted = False
        self.report = Generation()
        asked = [*self.messages, {"role": "user", "content": _checked(text)}]
        ids = self._encode(asked)
        self._check_fits(len(ids))
        logits = self._run_prompt(asked, ids)
        if logits is None:
            return
        is_open = opens_thinking(self.model.tokenizer, ids)
        answer = f"{THINK}\n" if is_open else ""
        for piece in mark_thinking(self._generated(logits), is_open):
            answer += piece.text
            is_open = piece.is_thinking and not piece.text.endswith(END_THINK)
            yield piece
        if self.report.ids or self.report.stop_reason != "interrupted":
            # Unfinished thinking is ended, so that a template can tell it from the answer.
            answer += f"\n{END_THINK}\n\n" if is_open else ""
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _encode(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        return self.model.encode_messages(messages, add_generation_prompt, **self._variables)

    def _check_fits(self, n_ids: int) -> None:
        engine = self.model.engine
        if n_ids > engine.n_ctx:
            raise InputError(
                f"the conversation has {n_ids} tokens, the context {engine.n_ctx} positions; /reset starts anew, "
                f"--ctx makes it larger (this model allows {engine.header.max_seq})"
            )

    def _run_prompt(self, asked: Sequence[Message], ids: list[int]) -> Float32s | None:
        """The logits [vocab] after ``ids``, the encoded messages ``asked``; None when it was interrupted."""
        started = time.perf_counter()
        is_recurrent = self.model.engine.is_recurrent
        n_asked = _n_common(ids, self._encode(asked, False)) if is_recurrent else 0
        try:
            logits, self.report.cached_tokens = self._cache.run(ids, n_asked, self._progress)
        except _InterruptedError:
            self.report.stop_reason = "interrupted"
            return None
        self.report.prompt_tokens = len(ids) - self.report.cached_tokens
        self.report.prefill_seconds = time.perf_counter() - started
        return logits

    def _generated(self, logits: Float32s) -> Iterator[str]:
        engine = self.model.engine
        ids = generate(engine, logits, self.sampler, self.report, self._max_tokens, self._stop_ids)
        return self.model.text(self._until_interrupted(ids), stops=self._stops, report=self.report)

    def _until_interrupted(self, ids: Iterable[int]) -> Iterator[int]:
        for token_id in ids:
            yield token_id
            if self._progress.is_interrupted:
                self.report.stop_reason = "interrupted"
                return


class PromptCache:
    """Runs prompts on ``engine``, keeping what it holds of them already.

    Layers with a recurrent state cannot go back to any place: for them a snapshot is taken where a prompt will be
    continued, whatever the template makes of the reply.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._snapshots: list[Snapshot] = []

    def run(self, ids: Sequence[int], n_asked: int = 0, progress: Progress = SILENT) -> tuple[Float32s, int]:
        """Makes ``ids`` the engine's sequence: (logits [vocab] of the last one, number of ids that were kept).

        ``n_asked``: how many ids stand before the place of the reply, where a recurrent model's snapshot is taken.
        """
        kept = self._rewind(ids)
        start = kept
        if self._engine.is_recurrent and start < n_asked < len(ids):
            prefill(self._engine, ids[start:n_asked], progress=progress, batch=_BATCH)
            self._snapshots = [*self._snapshots[1 - _MAX_SNAPSHOTS :], self._engine.snapshot()]
            start = n_asked
        return prefill(self._engine, ids[start:], progress=progress, batch=_BATCH), kept

    def _rewind(self, ids: Sequence[int]) -> int:
        """Goes back to the longest prefix of ``ids`` that the engine can keep; at least one id is left to run."""
        engine = self._engine
        n = min(_n_common(ids, engine.ids), len(ids) - 1)
        # Later ones will be written over.
        self._snapshots = [s for s in self._snapshots if len(s.ids) <= n and _n_common(s.ids, ids) == len(s.ids)]
        if n == engine.position or not engine.is_recurrent:
            engine.truncate(n)
            return n
        if self._snapshots:
            engine.restore(self._snapshots[-1])
        else:
            engine.reset()
        return engine.position


class _InterruptedError(Exception):
    """The user has stopped a prompt between two of its batches."""


class _Interruptible(Progress):
    """Passes on what happens, and ends a prompt between two batches: within one, the engine's state is half done."""

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self.is_interrupted = False

    def start(self, what: str, total: int, unit: str) -> None:
        self._inner.start(what, total, unit)

    def advance(self, n: int) -> None:
        self._inner.advance(n)
        if self.is_interrupted:
            raise _InterruptedError

    def finish(self) -> None:
        self._inner.finish()


def conversation(model: Model, text: str, system: str, variables: Mapping[str, Any]) -> list[Message]:
    """The messages of one question. Raises InputError (see :func:`check_system`; no text)."""
    check_system(model, system, variables)
    return [*_system(system), {"role": "user", "content": _checked(text)}]


def check_system(model: Model, text: str, variables: Mapping[str, Any]) -> None:
    """Raises InputError where the chat template refuses a system message, or would leave it out silently."""
    if not text:
        return
    question: Message = {"role": "user", "content": "a"}
    with_text = [*_system(_checked(text)), question]
    if model.encode_messages(with_text, **variables) == model.encode_messages([question], **variables):
        raise InputError("the chat template has no place for a system message; --template chooses another one")


def template_variables(model: Model, no_think: bool) -> dict[str, Any]:
    """What the chat template is told. Raises UsageError where ``no_think`` is asked for and it has no such switch."""
    if not no_think:
        return {}
    if "enable_thinking" not in model.chat_encoder.template.variables:
        raise UsageError("--no-think: the chat template has no switch for thinking (enable_thinking)")
    return {"enable_thinking": False}


def opens_thinking(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Whether the prompt ``ids`` ends with an opened thinking block, so that the reply begins inside of it."""
    tail: str = tokenizer.decode(list(ids[-_TAIL:]), skip_special_tokens=False)
    return tail.rstrip().endswith(THINK)


def mark_thinking(pieces: Iterable[str], is_open: bool = False) -> Iterator[Piece]:
    """The text of ``pieces`` with what is thinking (tags included) told apart, wherever their borders lie.

    ``is_open``: the text begins inside of a thinking block.
    """
    held = ""
    for text in pieces:
        held += text
        while (tag := END_THINK if is_open else THINK) in held:
            before, _, held = held.partition(tag)
            yield from _pieces(before, is_open)
            yield Piece(tag, True)
            is_open = not is_open
        cut = len(held) - _n_beginning(held, tag)
        yield from _pieces(held[:cut], is_open)
        held = held[cut:]
    yield from _pieces(held, is_open)


def _pieces(text: str, is_thinking: bool) -> Iterator[Piece]:
    if text:
        yield Piece(text, is_thinking)


def _n_beginning(text: str, tag: str) -> int:
    """The length of the longest end of ``text`` with which ``tag`` begins."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


def _system(text: str) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []


def _checked(text: str) -> str:
    if not text:
        raise InputError("the prompt is empty")
    if any("\ud800" <= c <= "\udfff" for c in text):  # what Python makes of input that is no UTF-8
        raise InputError("the prompt is not UTF-8 text")
    return text


def _n_common(a: Sequence[int] | np.ndarray[Any, Any], b: Sequence[int] | np.ndarray[Any, Any]) -> int:
    """The length of the common beginning of ``a`` and ``b``."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n], np.int64) != np.asarray(b[:n], np.int64))
    return int(differs[0]) if len(differs) else n
