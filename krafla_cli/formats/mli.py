"""MLI1 importance matrices: sums of squared inputs per channel, for every kind of matrix input of a model.

Source: the .mlb specification, "Importance matrix file".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import ShapeError
from krafla_cli.formats.atomic import write_bytes
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.faults import FORMAT, SHAPE, Report
from krafla_cli.formats.layout import Field, Layout, Rule, in_range, one_of
from krafla_cli.formats.mlb import MAX_DIM, Header
from krafla_cli.formats.text import printable

MAGIC = b"MLI1"
VERSION = 1
HEADER_BYTES = 40
CLASSIFIER = "classifier"

Float64s = npt.NDArray[np.float64]

_SIZE = Rule(in_range(1, MAX_DIM), f"must be 1 to {MAX_DIM}", SHAPE)
_Q_DIM = Rule(in_range(0, MAX_DIM), f"must be 0 (as dim) to {MAX_DIM}", SHAPE)

LAYOUT = Layout(
    HEADER_BYTES,
    (
        Field("magic", 0, "4s", "magic", (Rule(one_of(MAGIC), 'must be "MLI1"'),)),
        Field("version", 4, "I", "format version", (Rule(one_of(VERSION), "must be 1"),)),
        Field("n_layers", 8, "I", "layers", (_SIZE,)),
        Field("dim", 12, "I", "model width", (_SIZE,)),
        Field("hidden_dim", 16, "I", "FFN width", (_SIZE,)),
        Field("q_dim", 20, "I", "width of wo's input; 0: dim", (_Q_DIM,)),
        Field("layer_tokens", 24, "Q", "tokens summed into the layers"),
        Field("classifier_tokens", 32, "Q", "tokens summed into the classifier"),
    ),
)


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model that its importance matrix depends on; ``q_dim`` is never 0 here."""

    n_layers: int
    dim: int
    hidden_dim: int
    q_dim: int

    @staticmethod
    def of(header: Header) -> Dimensions:
        """Those of a .mlb model."""
        return Dimensions(header.n_layers, header.dim, header.hidden_dim, header.q_dim)

    @property
    def slots(self) -> dict[str, int]:
        """Channels of each input of a layer, in file order: of wq/wk/wv, of wo, of w1/w3, of w2."""
        return {"attn_in": self.dim, "attn_out": self.q_dim, "ffn_in": self.dim, "ffn_act": self.hidden_dim}

    @property
    def n_sums(self) -> int:
        """Sums in the whole file."""
        return self.n_layers * sum(self.slots.values()) + self.dim

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole file."""
        return HEADER_BYTES + 8 * self.n_sums

    def __str__(self) -> str:
        return f"{self.n_layers} layers, dim {self.dim}, hidden_dim {self.hidden_dim}, q_dim {self.q_dim}"


@dataclass
class Imatrix:
    """An importance matrix. ``sums`` float64 [n_sums], in file order; :meth:`of` gives a view of one slot."""

    dimensions: Dimensions
    sums: Float64s
    layer_tokens: int = 0
    classifier_tokens: int = 0

    @staticmethod
    def empty(dimensions: Dimensions) -> Imatrix:
        """All sums zero, no tokens."""
        return Imatrix(dimensions, np.zeros(dimensions.n_sums))

    def of(self, layer: int | None, slot: str) -> Float64s:
        """The sums of one input, [channels], as a view; ``layer`` None is the classifier."""
        start, n_channels = self.dimensions.n_sums - self.dimensions.dim, self.dimensions.dim
        if layer is not None:
            slots = self.dimensions.slots
            names = list(slots)
            start = layer * sum(slots.values()) + sum(slots[name] for name in names[: names.index(slot)])
            n_channels = slots[slot]
        return self.sums[start : start + n_channels]

    def tokens_of(self, layer: int | None) -> int:
        """Tokens summed into a slot of ``layer`` (None: of the classifier)."""
        return self.classifier_tokens if layer is None else self.layer_tokens

    def add(self, other: Imatrix) -> None:
        """Adds the sums and token counts of ``other``. Raises ShapeError where the dimensions differ."""
        if other.dimensions != self.dimensions:
            raise ShapeError(f"cannot add importance matrices of {self.dimensions} and of {other.dimensions}")
        self.sums += other.sums
        self.layer_tokens += other.layer_tokens
        self.classifier_tokens += other.classifier_tokens

    def to_bytes(self) -> bytes:
        """The bytes of the file."""
        d = self.dimensions
        header = {
            "magic": MAGIC,
            "version": VERSION,
            "n_layers": d.n_layers,
            "dim": d.dim,
            "hidden_dim": d.hidden_dim,
            "q_dim": 0 if d.q_dim == d.dim else d.q_dim,
            "layer_tokens": self.layer_tokens,
            "classifier_tokens": self.classifier_tokens,
        }
        return LAYOUT.pack(header) + self.sums.astype("<f8").tobytes()


def slots(dimensions: Dimensions) -> Iterator[tuple[int | None, str]]:
    """Every (layer, slot) in file order, the classifier (None) last."""
    for layer in range(dimensions.n_layers):
        for slot in dimensions.slots:
            yield layer, slot
    yield None, CLASSIFIER


def read(path: str | os.PathLike[str]) -> Imatrix:
    """Reads a whole importance matrix. Raises FileError, FormatError or ShapeError, naming the first fault."""
    data = map_file(path)
    report = Report(str(path), "mli")
    dimensions = _check(data, report)
    report.raise_first()
    values = LAYOUT.unpack(data)
    return Imatrix(dimensions, _sums(data).copy(), values["layer_tokens"], values["classifier_tokens"])


def write(imatrix: Imatrix, path: str | os.PathLike[str], force: bool = False) -> None:
    """Writes the file, complete or not at all. Raises FileError: it exists (without ``force``), cannot be written."""
    write_bytes(path, imatrix.to_bytes(), force)


def validate(path: str | os.PathLike[str]) -> Report:
    """Every fault of the file. Raises FileError when it cannot be opened."""
    report = Report(str(path), "mli")
    _check(map_file(path), report)
    return report


def _check(data: memoryview, report: Report) -> Dimensions:
    """Adds the faults of header, size and sums to ``report``; returns the dimensions, right if there are none."""
    values = LAYOUT.unpack(bytes(data[:HEADER_BYTES]).ljust(HEADER_BYTES, b"\0"))
    dimensions = Dimensions(values["n_layers"], values["dim"], values["hidden_dim"], values["q_dim"] or values["dim"])
    if len(data) < HEADER_BYTES:
        what = f"the file has {len(data)} bytes" if len(data) else "the file is empty"
        report.fault(FORMAT, "header", 0, f"needs {HEADER_BYTES} bytes, {what}")
        return dimensions
    report.faults.extend(LAYOUT.faults(values))
    if report.valid and len(data) != dimensions.n_bytes:
        text = f"{len(data)} bytes, the header implies {dimensions.n_bytes} ({dimensions})"
        report.fault(FORMAT, "file", None, text)
    if report.valid:
        _check_sums(data, dimensions, report)
    if report.valid:
        _warn_about_counts(values, Imatrix(dimensions, _sums(data)), report)
        if values["q_dim"] == values["dim"]:
            report.warn("q_dim", LAYOUT["q_dim"].offset, "is dim: it is written as 0 then")
    return dimensions


def _check_sums(data: memoryview, dimensions: Dimensions, report: Report) -> None:
    """The first sum of each slot that cannot be a sum of squares."""
    imatrix = Imatrix(dimensions, _sums(data))
    offset = HEADER_BYTES
    for layer, slot in slots(dimensions):
        sums = imatrix.of(layer, slot)
        good = np.isfinite(sums) & (sums >= 0)
        if not good.all():
            channel = int(np.argmin(good))
            text = f"sum of channel {channel} must be finite and >= 0, is {sums[channel]:g}"
            report.fault(FORMAT, slot_name(layer, slot), offset + 8 * channel, text)
        offset += 8 * len(sums)


def _warn_about_counts(values: dict[str, Any], imatrix: Imatrix, report: Report) -> None:
    """Counts that no recording ends with; channels without a sum are then weighed alike."""
    if not values["layer_tokens"]:
        report.warn("layer_tokens", LAYOUT["layer_tokens"].offset, "is 0: nothing was recorded in the layers")
    if not values["classifier_tokens"]:
        report.warn("classifier_tokens", LAYOUT["classifier_tokens"].offset, "is 0: nothing was recorded there")
    if values["classifier_tokens"] > values["layer_tokens"]:
        text = f"is {values['classifier_tokens']}, more than the {values['layer_tokens']} of the layers"
        report.warn("classifier_tokens", LAYOUT["classifier_tokens"].offset, text)
    offset = HEADER_BYTES
    for layer, slot in slots(imatrix.dimensions):
        sums = imatrix.of(layer, slot)
        n_tokens = values["classifier_tokens" if layer is None else "layer_tokens"]
        if bool(sums.any()) != bool(n_tokens):
            text = "all sums are 0" if n_tokens else "sums of no tokens are not 0"
            report.warn(slot_name(layer, slot), offset, text)
        offset += 8 * len(sums)


def _sums(data: memoryview) -> Float64s:
    return np.frombuffer(data, "<f8", offset=HEADER_BYTES)


def slot_name(layer: int | None, slot: str) -> str:
    """The name of a slot for people: "layers.3.ffn_in", "classifier"."""
    return CLASSIFIER if layer is None else f"layers.{layer}.{printable(slot)}"
