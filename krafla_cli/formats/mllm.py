"""MLLM model files: version 1 (names, sizes, types) and version 2 (shapes too), little-endian and packed.

Source: MLLM's ModelFileV1 and ModelFileV2 structures; the MLLM documentation, "Data Types in MLLM". Version 1 has no
shapes: they follow from the model's config.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import FormatError
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.data_types import BY_MLLM, DataType
from krafla_cli.formats.faults import FORMAT, SHAPE, BrokenError, Report
from krafla_cli.formats.layout import Field, Layout, Rule, one_of
from krafla_cli.formats.text import printable, printable_bytes
from krafla_cli.formats.values import warn_about_gaps, warn_about_tensor
from krafla_cli.formats.writer import AlignedWriter, Buffer, byte_view

MAGIC_V1, MAGIC_V2 = 20012, 0x519A
MAX_RANK = 16
ALIGNMENT = 64  # of the tensors that this tool writes; readers go by the offsets

HEADER_V1 = Layout(
    12,
    (
        Field("magic", 0, "i", "20012", (Rule(one_of(MAGIC_V1), f"must be {MAGIC_V1}"),)),
        Field("descriptor_bytes", 4, "Q", "bytes of the descriptors that follow"),
    ),
)
HEADER_V2 = Layout(
    532,
    (
        Field("magic", 0, "i", "0x519A", (Rule(one_of(MAGIC_V2), f"must be {MAGIC_V2:#x}"),)),
        Field("version", 4, "i", "format version", (Rule(one_of(2), "must be 2"),)),
        Field("name", 8, "512s", "name of the model, ended by a zero byte"),
        Field("count", 520, "I", "number of tensors"),
        Field("descriptor_offset", 524, "Q", "place of the tensors' descriptors"),
    ),
)
DESCRIPTOR_V2 = Layout(
    352,
    (
        Field("id", 0, "I", "index of the tensor"),
        Field("type", 4, "I", "data type"),
        Field("n_bytes", 8, "Q", "bytes of its data"),
        Field("offset", 16, "Q", "place of its data"),
        Field("rank", 24, "Q", "number of dimensions"),
        Field("shape", 32, "16i", "dimensions"),
        Field("name", 96, "256s", "name, ended by a zero byte"),
    ),
)
_LEAST_V1 = 4 + 8 + 8 + 4  # a descriptor with an empty name


@dataclass(frozen=True)
class TensorInfo:
    """One tensor; ``shape`` is None in version 1, which has none. ``offset`` is its place in the file."""

    name: str
    kind: DataType
    shape: tuple[int, ...] | None
    offset: int
    n_bytes: int

    @property
    def n_weights(self) -> int | None:
        """None where the type's layout is not public."""
        return self.n_bytes // self.kind.n_bytes * self.kind.block if self.kind.block else None


class MllmFile:
    """An open file: ``version``, ``name`` (empty in version 1), ``tensors`` by name in the order of descriptors."""

    def __init__(self, path: str, data: memoryview, reading: _Reading) -> None:
        self.path = path
        self.data = data
        self.version = reading.version
        self.header = reading.header
        self.tensors = reading.tensors

    @property
    def title(self) -> str:
        return printable(self.path)

    @property
    def name(self) -> str:
        return _text(self.header["name"]) or "" if self.version == 2 else ""

    @property
    def layout(self) -> Layout:
        return HEADER_V2 if self.version == 2 else HEADER_V1

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, zero copy."""
        info = self.tensors[name]
        return np.frombuffer(self.data, np.uint8, info.n_bytes, info.offset)


def open_mllm(path: str | os.PathLike[str]) -> MllmFile:
    """Opens a file. Raises FileError (cannot be opened), FormatError or ShapeError naming the first fault."""
    data = map_file(path)
    report = Report(str(path), "mllm")
    reading = _Reading(data, report)
    report.raise_first()
    return MllmFile(str(path), data, reading)


def validate(path: str | os.PathLike[str]) -> Report:
    """Every fault of the file, as far as going on is safe. Raises FileError when it cannot be opened."""
    report = Report(str(path), "mllm")
    reading = _Reading(map_file(path), report)
    if report.valid:
        spans = reading.spans()
        end = max(stop for _, stop, _ in spans)
        if len(reading.data) > -(-end // ALIGNMENT) * ALIGNMENT:
            report.warn("file", end, f"{len(reading.data) - end} bytes after the last tensor belong to nothing")
        warn_about_gaps(reading.data, spans, end, report)
        for t in reading.tensors.values():
            content = reading.data[t.offset : t.offset + t.n_bytes]
            warn_about_tensor(content, printable(t.name), t.kind, t.shape, t.offset, report)
    return report


def _text(data: bytes) -> str | None:
    """The text before the first zero byte; None where it is no UTF-8."""
    try:
        return data.split(b"\0", 1)[0].decode("utf-8")
    except UnicodeDecodeError:
        return None


class _Descriptor(NamedTuple):
    """A descriptor as it stands in the file, at ``place``; ``number`` is its data type."""

    place: int
    name: str
    number: int
    n_bytes: int
    offset: int
    shape: tuple[int, ...] | None


class _Reading:
    """One pass over a file: what could be read, and the faults in ``report``."""

    def __init__(self, data: memoryview, report: Report) -> None:
        self.data = data
        self.report = report
        self.version = 0
        self.header: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        # Parts of the file that are no tensor: (start, end, what).
        self._taken: list[tuple[int, int, str]] = []
        try:
            self._read()
        except BrokenError as error:
            report.faults.append(error.fault)
        else:
            self._check_places()

    def _read(self) -> None:
        magic = struct.unpack_from("<i", self.data)[0] if len(self.data) >= 4 else None
        if magic not in (MAGIC_V1, MAGIC_V2):
            found = "the file is empty" if not len(self.data) else f'is "{printable_bytes(bytes(self.data[:4]))}"'
            raise BrokenError("magic", 0, f"must be {MAGIC_V1} (version 1) or {MAGIC_V2:#x} (version 2), {found}")
        self.version = 1 if magic == MAGIC_V1 else 2
        layout = HEADER_V1 if self.version == 1 else HEADER_V2
        if len(self.data) < layout.n_bytes:
            raise BrokenError("header", 0, f"needs {layout.n_bytes} bytes, the file has {len(self.data)}")
        self.header = layout.unpack(self.data)
        for fault in layout.faults(self.header):
            raise BrokenError(fault.where, fault.offset or 0, fault.message)
        self._taken.append((0, layout.n_bytes, "the header"))
        descriptors = self._descriptors_v1() if self.version == 1 else self._descriptors_v2()
        for descriptor in descriptors:
            try:
                self._add(descriptor)
            except BrokenError as error:
                self.report.faults.append(error.fault)

    def _descriptors_v1(self) -> Iterator[_Descriptor]:
        n_bytes = self.header["descriptor_bytes"]
        start, end = HEADER_V1.n_bytes, HEADER_V1.n_bytes + n_bytes
        if end > len(self.data):
            raise BrokenError(
                "descriptor_bytes", 4, f"{n_bytes}, the file has {len(self.data) - HEADER_V1.n_bytes} after the header"
            )
        self._taken.append((start, end, "the descriptors"))
        i = 0
        while start < end:
            length = struct.unpack_from("<i", self.data, start)[0] if end - start >= 4 else 0
            if not 0 <= length <= end - start - _LEAST_V1:
                raise BrokenError(
                    f"descriptor {i}", start, f"name length {length}, the descriptors have {end - start} bytes left"
                )
            name = self._name(bytes(self.data[start + 4 : start + 4 + length]), i, start)
            size, offset, number = struct.unpack_from("<QQi", self.data, start + 4 + length)
            yield _Descriptor(start, name, number, size, offset, None)
            start += _LEAST_V1 + length
            i += 1

    def _descriptors_v2(self) -> Iterator[_Descriptor]:
        count, first = self.header["count"], self.header["descriptor_offset"]
        end = first + count * DESCRIPTOR_V2.n_bytes
        if end > len(self.data):
            raise BrokenError(
                "descriptor_offset",
                524,
                f"{count} descriptors at {first} end at byte {end}, the file has {len(self.data)}",
            )
        self._taken.append((first, end, "the descriptors"))
        for i in range(count):
            place = first + i * DESCRIPTOR_V2.n_bytes
            values = DESCRIPTOR_V2.unpack(self.data[place : place + DESCRIPTOR_V2.n_bytes])
            name = self._name(values["name"], i, place)
            if values["rank"] > MAX_RANK:
                raise BrokenError(name, place, f"has {values['rank']} dimensions, at most {MAX_RANK} are allowed")
            shape = values["shape"][: values["rank"]]
            yield _Descriptor(place, name, values["type"], values["n_bytes"], values["offset"], shape)

    def _name(self, data: bytes, i: int, place: int) -> str:
        name = _text(data)
        if not name:
            raise BrokenError(f"descriptor {i}", place, "has no name" if name == "" else "its name is not UTF-8")
        return name

    def _add(self, d: _Descriptor) -> None:
        """Checks and records one tensor. Raises BrokenError."""
        kind = BY_MLLM.get(d.number)
        if kind is None:
            raise BrokenError(d.name, d.place, f"has the unknown data type {d.number}")
        if kind.mllm_version and kind.mllm_version > self.version:
            text = f"is {kind.name}, which only version {kind.mllm_version} of the format has"
            raise BrokenError(d.name, d.place, text)
        if d.name in self.tensors:
            raise BrokenError(d.name, d.place, "occurs twice")
        _check_size(d, kind)
        end = d.offset + d.n_bytes
        if end > len(self.data):
            cut = f"the file has {len(self.data)}; it was cut off, or the descriptor is wrong"
            raise BrokenError(d.name, d.place, f"ends at byte {end}, {cut}")
        self.tensors[d.name] = TensorInfo(d.name, kind, d.shape, d.offset, d.n_bytes)

    def spans(self) -> list[tuple[int, int, str]]:
        """Every part of the file: start, end, and what it is."""
        return self._taken + [(t.offset, t.offset + t.n_bytes, printable(t.name)) for t in self.tensors.values()]

    def _check_places(self) -> None:
        """No two tensors share bytes, and none lies on header or descriptors."""
        end, before = 0, ""
        for start, stop, what in sorted(self.spans()):
            if start < end and stop > start:
                self.report.fault(FORMAT, what, start, f"overlaps {before}, which ends at byte {end}")
            if stop > end:
                end, before = stop, what


def _check_size(d: _Descriptor, kind: DataType) -> None:
    if d.shape is None:
        if kind.block and d.n_bytes % kind.n_bytes:
            text = f"{d.n_bytes} bytes are no whole blocks of {kind.n_bytes} ({kind.name})"
            raise BrokenError(d.name, d.place, text, SHAPE)
        return
    if any(size < 1 for size in d.shape):
        raise BrokenError(d.name, d.place, f"has the shape {list(d.shape)}: a dimension is below 1", SHAPE)
    expected = kind.size(math.prod(d.shape))
    if kind.block and expected != d.n_bytes:
        needs = f"needs {expected}" if expected is not None else f"is no whole blocks of {kind.block} weights"
        raise BrokenError(d.name, d.place, f"{d.n_bytes} bytes, {kind.name} {list(d.shape)} {needs}", SHAPE)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written."""

    name: str
    kind: DataType
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        size = self.kind.size(math.prod(self.shape))
        if size is None:
            raise ValueError(f"{self.name}: {self.shape} is no whole blocks of {self.kind.name}")
        return size


class MllmWriter:
    """Writes a version 2 file front to back: header and descriptors at once, then each tensor in its order.

    Wrong order and sizes are defects of the caller and raise ValueError; a name that does not fit raises FormatError.
    """

    def __init__(self, file: BinaryIO, model_name: str, tensors: Sequence[NewTensor]) -> None:
        self._out = AlignedWriter(file, ALIGNMENT)
        self._next = iter(tensors)
        header = {
            "magic": MAGIC_V2,
            "version": 2,
            "name": _field(model_name, 512),
            "count": len(tensors),
            "descriptor_offset": HEADER_V2.n_bytes,
        }
        self._out.write(HEADER_V2.pack(header))
        offset = HEADER_V2.n_bytes + len(tensors) * DESCRIPTOR_V2.n_bytes
        for i, tensor in enumerate(tensors):
            offset = -(-offset // ALIGNMENT) * ALIGNMENT
            self._out.write(_descriptor(i, tensor, offset))
            offset += tensor.n_bytes

    def write(self, name: str, data: Buffer) -> None:
        """Appends the bytes of tensor ``name``, C-contiguous."""
        tensor = next(self._next, None)
        n_bytes = byte_view(data).nbytes
        if tensor is None or tensor.name != name or tensor.n_bytes != n_bytes:
            raise ValueError(f"{name} with {n_bytes} bytes written where {tensor or 'the end'} belongs")
        self._out.pad()
        self._out.write(data)

    def finish(self) -> None:
        """Checks that every tensor has been written."""
        tensor = next(self._next, None)
        if tensor is not None:
            raise ValueError(f"{tensor.name} was never written")


def _descriptor(i: int, tensor: NewTensor, offset: int) -> bytes:
    return DESCRIPTOR_V2.pack(
        {
            "id": i,
            "type": tensor.kind.mllm,
            "n_bytes": tensor.n_bytes,
            "offset": offset,
            "rank": len(tensor.shape),
            "shape": tensor.shape + (0,) * (MAX_RANK - len(tensor.shape)),
            "name": _field(tensor.name, 256),
        }
    )


def _field(text: str, n_bytes: int) -> bytes:
    """``text`` in a field of ``n_bytes`` that a zero byte must end."""
    data = text.encode("utf-8")
    if len(data) >= n_bytes or b"\0" in data:
        raise FormatError(f'the name "{printable(text)}" has {len(data)} bytes, an MLLM file holds {n_bytes - 1}')
    return data
