"""Recording importance matrices: the squared inputs of every matrix while a text runs through an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from krafla_cli.errors import DataError, InputError, ShapeError
from krafla_cli.formats.mlb import Header
from krafla_cli.formats.mli import Dimensions, Imatrix, read
from krafla_cli.formats.text import printable
from krafla_cli.pool import LocalPool, Pool, Speeds
from krafla_cli.progress import SILENT, Progress
from krafla_cli.runtime.engine import Engine, Float32s, Slot
from krafla_cli.runtime.generation import BATCH

DEFAULT_WINDOW = 512
# What a slot is the input of, for messages.
_MATRICES = {
    "attn_in": "wq, wk and wv",
    "attn_out": "wo",
    "ffn_in": "w1 and w3",
    "ffn_act": "w2",
    "classifier": "the classifier",
}


def windows(ids: Sequence[int], n_positions: int, prefix: Sequence[int] = ()) -> Iterator[list[int]]:
    """``ids`` cut into windows of at most ``n_positions``, each starting with ``prefix`` (BOS, where there is one).

    Raises InputError: no ids, or no room beside the prefix.
    """
    step = n_positions - len(prefix)
    if step < 1:
        raise InputError(f"a window of {n_positions} positions holds no text beside the {len(prefix)} start tokens")
    if not len(ids):
        raise InputError("the text is empty: no tokens to run")
    for start in range(0, len(ids), step):
        yield [*prefix, *ids[start : start + step]]


class Recorder:
    """An observer that sums squares, float64: within a window position by position, then window by window."""

    def __init__(self, total: Imatrix) -> None:
        self.total = total
        self._window = Imatrix.empty(total.dimensions)

    def __call__(self, layer: int | None, slot: Slot, values: Float32s) -> None:
        """Adds inputs [T, channels]. Raises DataError naming layer and matrix where one is NaN or infinite."""
        if not np.isfinite(values).all():
            raise _broken(layer, slot, values)
        sums = self._window.of(layer, slot)
        if values.shape[1] != len(sums):
            # Of a linear-attention layer whose lout is wider or narrower than wo: the format has no place for it.
            return
        # In position order whatever the batch: each addition starts from the sum so far.
        squares = np.vstack((sums, values))
        np.square(squares[1:], out=squares[1:])
        np.add.reduce(squares, axis=0, out=sums)

    def end_window(self, n_layer_tokens: int, n_classifier_tokens: int) -> None:
        """Adds the window to the total."""
        self._window.layer_tokens = n_layer_tokens
        self._window.classifier_tokens = n_classifier_tokens
        self.total.add(self._window)
        self._window = Imatrix.empty(self.total.dimensions)


def _broken(layer: int | None, slot: Slot, values: Float32s) -> DataError:
    position, channel = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
    where = "" if layer is None else f"layer {layer}: "
    value = values[position, channel]
    return DataError(f"{where}the input of {_MATRICES[slot]} is {value} at channel {channel}; nothing was written")


class WindowRecorder:
    """Runs windows from an empty sequence each; a worker of :func:`record_windows`."""

    def __init__(self, engine: Engine, with_logits: bool = True) -> None:
        self.engine = engine
        self.with_logits = with_logits

    def __call__(self, part: Sequence[int]) -> Imatrix:
        """The sums of one window. Raises InputError (longer than the context), DataError (broken activations)."""
        recorder = Recorder(Imatrix.empty(Dimensions.of(self.engine.header)))
        self.engine.observer = recorder
        try:
            self.engine.reset()
            for start in range(0, len(part), BATCH):
                self.engine.forward(part[start : start + BATCH], "all" if self.with_logits else "none")
        finally:
            self.engine.observer = None
        recorder.end_window(len(part), len(part) if self.with_logits else 0)
        return recorder.total


def record(
    engine: Engine,
    ids: Sequence[int],
    n_positions: int = DEFAULT_WINDOW,
    prefix: Sequence[int] = (),
    with_logits: bool = True,
    onto: Imatrix | None = None,
    progress: Progress = SILENT,
) -> Imatrix:
    """Runs ``ids`` in windows of ``n_positions`` that each start an empty sequence; returns the sums of their inputs.

    ``with_logits`` computes logits at every position, so that the classifier's input is counted too; ``onto`` is added
    to, as if its text and this one had been recorded in one run. Raises InputError (no text, windows longer than the
    context), DataError (NaN or infinite activations).
    """
    total = onto or Imatrix.empty(Dimensions.of(engine.header))
    parts = list(windows(ids, n_positions, prefix))
    record_windows(LocalPool(), lambda: WindowRecorder(engine, with_logits), parts, total, progress)
    return total


def record_windows(
    pool: Pool,
    open_recorder: Callable[[], WindowRecorder],
    parts: Sequence[Sequence[int]],
    total: Imatrix,
    progress: Progress = SILENT,
) -> Speeds:
    """Adds the sums of windows to ``total``, in the order of the windows, so that the bits do not depend on the pool.

    Returns the tokens a second of each worker. Raises as :class:`WindowRecorder`.
    """
    speeds = Speeds()
    progress.start("imatrix", sum(len(part) for part in parts), "tok")
    try:
        for part, done in zip(parts, pool.map(open_recorder, parts), strict=True):
            total.add(done.value)
            speeds.add(done, len(part))
            progress.advance(len(part))
    finally:
        progress.finish()
    return speeds


def read_previous(path: Path, header: Header) -> Imatrix | None:
    """The importance matrix to add to, None where there is no file yet.

    Raises FileError, FormatError (a broken file), ShapeError (one of a model with other dimensions).
    """
    if not path.exists():
        return None
    previous = read(path)
    if previous.dimensions != Dimensions.of(header):
        raise ShapeError(
            f"{printable(str(path))} is of another model: {previous.dimensions}; this one has {Dimensions.of(header)}"
        )
    return previous
