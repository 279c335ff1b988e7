"""Texts to embeddings with a LEMB model: tokenizing, batches of like length, threads, Matryoshka widths."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from krafla_cli.embed.forward import Encoder, cut
from krafla_cli.embed.wordpiece import TextEncoder
from krafla_cli.errors import DataError, InputError
from krafla_cli.formats.lemb import LembModel, read
from krafla_cli.progress import SILENT, Progress

Float32 = npt.NDArray[np.float32]

BATCH_TOKENS = 512  # a batch's widest activations (ffn_dim 1024: 2 MB) stay in the second-level cache or near it


class Embedder:
    """A model with its tokenizer. Batches run on ``threads`` threads; the result does not depend on their number."""

    def __init__(self, model: LembModel, threads: int = 1) -> None:
        self.model = model
        self.threads = threads
        self.text_encoder = TextEncoder(model)
        self.encoder = Encoder(model)

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
        ids = [np.array(i, np.int64) for i in self.text_encoder.active_ids(texts)]
        if not all(map(len, ids)):
            number = first_number + [len(i) for i in ids].index(0)
            raise DataError(f"text {number} has no tokens other than padding")
        out = np.empty((len(texts), width), np.float32)
        batches = list(batches_of([len(i) for i in ids], BATCH_TOKENS))

        def run(batch: list[int]) -> None:
            with np.errstate(all="ignore"):  # what is not finite in the end is refused by name
                out[batch] = cut(self.encoder.project([ids[i] for i in batch]), width)
            progress.advance(len(batch))

        if self.threads == 1 or len(batches) == 1:
            for batch in batches:
                run(batch)
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(run, batches))
        _check_finite(out, first_number)
        return out


def _check_finite(out: Float32, first_number: int) -> None:
    finite = np.isfinite(out).all(axis=1)
    if not finite.all():
        raise DataError(f"text {int(np.argmin(finite)) + 1}: its embedding is not finite; the weights are too large")


def batches_of(lengths: Sequence[int], n_tokens: int) -> Iterator[list[int]]:
    """Indices by ascending length, in batches of at most ``n_tokens`` tokens (or one text)."""
    batch: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and total + lengths[index] > n_tokens:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += lengths[index]
    if batch:
        yield batch


def open_embedder(path: str | os.PathLike[str], threads: int = 1) -> Embedder:
    """The model in ``path``, ready to embed. Raises FileError, FormatError, ShapeError.

    >>> embedder = krafla_cli.open_embedder("student.bin")
    >>> vectors = embedder.embed(["the cat sleeps", "kedi uyuyor"], dims=32)
    >>> vectors.shape, vectors.dtype
    ((2, 32), dtype('float32'))
    """
    return Embedder(read(path), threads)
