"""Texts to embeddings with a LEMB model: tokenizing, batches of like length, threads, Matryoshka widths."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice, pairwise

import numpy as np
import numpy.typing as npt

from krafla_cli.embed.forward import BATCH_TOKENS, Encoder, Runner
from krafla_cli.embed.wordpiece import TextEncoder, Tokens
from krafla_cli.errors import DataError, InputError
from krafla_cli.formats.lemb import LembModel, read
from krafla_cli.kernels import text_operations as ops
from krafla_cli.progress import SILENT, Progress

Float32 = npt.NDArray[np.float32]

GROUP_TOKENS = 1 << 15  # tokens done without Python: half a second, after which a bar moves and Ctrl-C is seen


class Embedder:
    """A model with its tokenizer. Batches run on ``threads`` threads; the result does not depend on their number."""

    def __init__(self, model: LembModel, threads: int = 1, progress: Progress = SILENT) -> None:
        self.model = model
        self.threads = threads
        self.text_encoder = TextEncoder(model)
        self.encoder = Encoder(model, progress)
        self._runners: queue.SimpleQueue[Runner] = queue.SimpleQueue()  # those that no thread has at present

    @property
    def dims(self) -> tuple[int, ...]:
        """The widths that an embedding may have, ascending; the last is the full one."""
        return self.model.header.dims

    def check_dims(self, dims: int | None) -> int:
        """``dims``, or the full width for None. Raises InputError that lists the valid ones."""
        if dims is None:
            return self.dims[-1]
        if dims not in self.dims:
            raise InputError(f"dims {dims} is not one of this model's: {', '.join(map(str, self.dims))}")
        return dims

    def embed(
        self, texts: Sequence[str], dims: int | None = None, progress: Progress = SILENT, first_number: int = 1
    ) -> Float32:
        """The embeddings of ``texts``: float32 [len(texts), dims], rows of length 1.

        An empty text has the embedding of [CLS] [SEP]. ``first_number`` is the first text's, for errors. Raises
        InputError (dims, a text that is not valid Unicode), DataError (a vector that is not finite, or a text without
        a token that is not padding).
        """
        width = self.check_dims(dims)
        return self._embed_tokens(self._tokens(texts, first_number), width, progress, first_number)

    def embed_chunks(
        self, chunks: Iterable[list[str]], dims: int | None = None, progress: Progress = SILENT, first_number: int = 1
    ) -> Iterator[tuple[list[str], Float32]]:
        """As :meth:`embed`, chunk by chunk; with several threads, the next is tokenized while one is embedded."""
        width = self.check_dims(dims)
        remaining = iter(chunks)
        opening = list(islice(remaining, 2))
        if self.threads == 1 or len(opening) < 2:
            for chunk in chain(opening, remaining):
                yield chunk, self.embed(chunk, width, progress, first_number)
                first_number += len(chunk)
            return
        with ThreadPoolExecutor(1) as tokenizer:
            ahead: list[tuple[list[str], Future[Tokens], int]] = []
            for chunk in chain(opening, remaining):
                ahead.append((chunk, tokenizer.submit(self._tokens, chunk, first_number), first_number))
                first_number += len(chunk)
                if len(ahead) == 2:
                    yield self._embed_ahead(*ahead.pop(0), width, progress)
            for rest in ahead:
                yield self._embed_ahead(*rest, width, progress)

    def _embed_ahead(
        self, chunk: list[str], tokens: Future[Tokens], first_number: int, width: int, progress: Progress
    ) -> tuple[list[str], Float32]:
        return chunk, self._embed_tokens(tokens.result(), width, progress, first_number)

    def _tokens(self, texts: Sequence[str], first_number: int) -> Tokens:
        tokens = self.text_encoder.active_ids(texts)
        if not tokens.lengths.all():
            number = first_number + int(np.argmin(tokens.lengths))
            raise DataError(f"text {number} has no tokens other than padding")
        return tokens

    def _embed_tokens(self, tokens: Tokens, width: int, progress: Progress, first_number: int) -> Float32:
        order = np.argsort(tokens.lengths, kind="stable")
        ordered = tokens.gathered(order)
        rows = np.empty((len(tokens), width), np.float32)
        with ThreadPoolExecutor(self.threads) as pool:
            for first, end in batches_of(ordered.starts, GROUP_TOKENS):
                self._run_group(ordered, first, end, rows, pool)
                progress.advance(end - first)
        out = np.empty_like(rows)
        out[order] = rows
        _check_finite(out, first_number)
        return out

    def _run_group(self, tokens: Tokens, first: int, end: int, rows: Float32, pool: ThreadPoolExecutor) -> None:
        """Fills rows[first:end]: all threads take batches of these texts until none is left."""
        starts = tokens.starts[first : end + 1]
        bounds = batches_of(starts, BATCH_TOKENS)
        relative = [starts[a : b + 1] - starts[a] for a, b in bounds]
        batches = np.stack(
            [
                ops.BATCH.pack(
                    n_tokens=int(r[-1]),
                    n_texts=b - a,
                    ids=tokens.ids[starts[a] :],
                    starts=r,
                    width=rows.shape[1],
                    out=rows[first + a :],
                )
                for (a, b), r in zip(bounds, relative, strict=True)
            ]
        )
        taken = np.zeros(1, np.int64)
        n_tokens = int(max(r[-1] for r in relative))

        def work(_: int) -> None:
            runner = self._take_runner(n_tokens)
            runner.run_batches(batches, taken)
            self._runners.put(runner)

        n_threads = min(self.threads, len(bounds))
        if n_threads == 1:
            work(0)
        else:
            list(pool.map(work, range(n_threads)))

    def _take_runner(self, n_tokens: int) -> Runner:
        """A runner with room for ``n_tokens`` tokens."""
        try:
            runner = self._runners.get_nowait()
        except queue.Empty:
            return Runner(self.encoder, max(n_tokens, BATCH_TOKENS))
        return runner if n_tokens <= runner.n_tokens else Runner(self.encoder, n_tokens)


def _check_finite(out: Float32, first_number: int) -> None:
    finite = np.isfinite(out)
    if not finite.all():
        number = first_number + int(np.argmin(finite.all(axis=1)))
        raise DataError(f"text {number}: its embedding is not finite; the weights are too large")


def batches_of(starts: npt.NDArray[np.int64], n_tokens: int) -> list[tuple[int, int]]:
    """Texts first to end for each batch, of at most ``n_tokens`` tokens (or one text); starts: [texts + 1]."""
    bounds = [0]
    n_texts = len(starts) - 1
    while bounds[-1] < n_texts:
        limit = starts[bounds[-1]] + n_tokens
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(starts, limit, side="right")) - 1))
    return list(pairwise(bounds))


def open_embedder(path: str | os.PathLike[str], threads: int = 1, progress: Progress = SILENT) -> Embedder:
    """The model in ``path``, ready to embed. Raises FileError, FormatError, ShapeError.

    ``progress`` is told when the kernels have to be compiled, which the first use on a machine does.

    >>> embedder = krafla_cli.open_embedder("student.bin")
    >>> vectors = embedder.embed(["the cat sleeps", "kedi uyuyor"], dims=32)
    >>> vectors.shape, vectors.dtype
    ((2, 32), dtype('float32'))
    """
    return Embedder(read(path), threads, progress)
