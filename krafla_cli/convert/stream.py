"""Tensors that are quantized by several threads, a few ahead of the one that is wanted: bounds time and memory."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from krafla_cli.convert.tensors import Encoding
from krafla_cli.quant.errors import Errors

_WEIGHTS_AHEAD = 1 << 25  # of the tensors after the present one: enough that no thread waits at a tensor's end


class InWork:
    """A tensor whose parts threads work on. ``errors``: of the parts that :meth:`complete_rows` has passed."""

    def __init__(self, encoding: Encoding, pool: ThreadPoolExecutor) -> None:
        self.encoding = encoding
        self.errors = Errors()
        self._futures: deque[Future[Errors]] = deque(pool.submit(encoding.run, part) for part in encoding.parts)

    def complete_rows(self) -> Iterator[int]:
        """Waits for each part in order, and gives the number of rows that are complete up to it.

        Raises what the part raised.
        """
        for part in self.encoding.parts:
            self.errors += self._futures.popleft().result()
            yield part.stop


@contextlib.contextmanager
def in_work(encodings: Iterable[Encoding], n_threads: int) -> Iterator[Iterator[InWork]]:
    """The tensors in order, each with its work going on. At the end of the block no thread is left behind."""
    pool = ThreadPoolExecutor(n_threads)
    try:
        yield _some_ahead(encodings, pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _some_ahead(encodings: Iterable[Encoding], pool: ThreadPoolExecutor) -> Iterator[InWork]:
    ahead: deque[InWork] = deque()
    n_ahead = 0  # weights of all but the first
    for encoding in encodings:
        if ahead:
            n_ahead += encoding.plan.spec.n_weights
        ahead.append(InWork(encoding, pool))
        while n_ahead >= _WEIGHTS_AHEAD:
            yield ahead.popleft()
            n_ahead -= ahead[0].encoding.plan.spec.n_weights
    while ahead:
        yield ahead.popleft()
