"""Reading GGUF files, versions 2 and 3, little-endian: mapped, every length checked against the file before its use.

Layout (GGUF specification): a 24-byte header; ``metadata_kv_count`` pairs of key and typed value; ``tensor_count``
descriptions (name, dimensions from the innermost out, type, offset); zeros up to the alignment; the tensors' data.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import FormatError
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.data_types import BY_GGML, DataType
from krafla_cli.formats.faults import FORMAT, SHAPE, BrokenError, Report
from krafla_cli.formats.layout import Field, Layout, Rule, one_of
from krafla_cli.formats.text import printable
from krafla_cli.formats.values import warn_about_gaps, warn_about_tensor

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
# Metadata types with a fixed size: number -> NumPy type.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
TYPE_NAMES = {
    0: "uint8", 1: "int8", 2: "uint16", 3: "int16", 4: "uint32", 5: "int32", 6: "float32", 7: "bool", 8: "string",
    9: "array", 10: "uint64", 11: "int64", 12: "float64",
}  # fmt: skip
_WORDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a bool",
    list: "an array of strings",
}
_LEAST_PAIR = 8 + 4 + 1  # key length, type, the smallest value
_LEAST_TENSOR = 8 + 4 + 4 + 8  # name length, number of dimensions, type, offset
_REMOVED = {4: "Q4_2", 5: "Q4_3", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
_T = TypeVar("_T")

HEADER = Layout(
    24,
    (
        Field("magic", 0, "4s", "GGUF", (Rule(one_of(MAGIC), 'must be "GGUF"'),)),
        Field("version", 4, "I", "format version", (Rule(one_of(2, 3), "must be 2 or 3"),)),
        Field("tensor_count", 8, "Q", "number of tensors"),
        Field("metadata_kv_count", 16, "Q", "number of metadata pairs"),
    ),
)


@dataclass(frozen=True)
class Value:
    """A metadata value: a number, truth value or text; an array of texts is a list, of numbers a NumPy array."""

    type_name: str
    value: Any
    offset: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: ``shape`` with the innermost dimension last (as NumPy has it), ``offset`` in the file."""

    name: str
    kind: DataType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int

    @property
    def n_weights(self) -> int:
        return math.prod(self.shape)


class GgufFile:
    """An open file: ``metadata`` by key, ``tensors`` by name in file order."""

    def __init__(self, path: str, data: memoryview, reading: _Reading) -> None:
        self.path = path
        self.data = data
        self.header = reading.header
        self.metadata = reading.metadata
        self.tensors = reading.tensors
        self.alignment = reading.alignment

    @property
    def title(self) -> str:
        return printable(self.path)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, zero copy."""
        info = self.tensors[name]
        return np.frombuffer(self.data, np.uint8, info.n_bytes, info.offset)

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """The value of ``key``; None where it is missing. Raises FormatError where it is no ``kind``."""
        entry = self.metadata.get(key)
        if entry is None:
            return None
        value = entry.value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise FormatError(
                f"{self.title}: {printable(key)} at offset {entry.offset} is of type {entry.type_name}, "
                f"must be {_WORDS[kind]}"
            )
        return value

    def require(self, key: str, kind: type[_T]) -> _T:
        """As :meth:`get`; raises FormatError where the key is missing."""
        value = self.get(key, kind)
        if value is None:
            raise FormatError(f"{self.title}: metadata {printable(key)} is missing")
        return value


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Opens a file. Raises FileError (cannot be opened), FormatError or ShapeError naming the first fault."""
    data = map_file(path)
    report = Report(str(path), "gguf")
    reading = _Reading(data, report)
    report.raise_first()
    return GgufFile(str(path), data, reading)


def validate(path: str | os.PathLike[str]) -> Report:
    """Every fault of the file, as far as going on is safe. Raises FileError when it cannot be opened."""
    data = map_file(path)
    report = Report(str(path), "gguf")
    reading = _Reading(data, report)
    if report.valid:
        _warn(data, reading, report)
    return report


def _warn(data: memoryview, reading: _Reading, report: Report) -> None:
    end = max((t.offset + t.n_bytes for t in reading.tensors.values()), default=reading.data_offset)
    padded = _aligned(end, reading.alignment)
    if len(data) > padded:
        report.warn("file", padded, f"{len(data) - padded} bytes after the last tensor belong to nothing")
    for t in reading.tensors.values():
        content = data[t.offset : t.offset + t.n_bytes]
        warn_about_tensor(content, printable(t.name), t.kind, t.shape, t.offset, report)
    spans = [(t.offset, t.offset + t.n_bytes, printable(t.name)) for t in reading.tensors.values()]
    warn_about_gaps(data, [(0, reading.offset, "the descriptions"), *spans], min(padded, len(data)), report)
    count = reading.metadata.get("split.count")
    if count is not None and isinstance(count.value, int) and count.value > 1:
        report.warn("split.count", count.offset, f"the model is split over {count.value} files; this is one of them")


class _Description(NamedTuple):
    """A tensor's description as it stands in the file, at ``place``; ``relative`` is its offset in the data."""

    place: int
    name: str
    shape: tuple[int, ...]
    number: int
    relative: int


class _Reading:
    """One pass over a file: what could be read, and the faults in ``report``."""

    def __init__(self, data: memoryview, report: Report) -> None:
        self.data = data
        self.report = report
        self.offset = 0
        self.header: dict[str, Any] = {}
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.alignment = DEFAULT_ALIGNMENT
        self.data_offset = 0
        try:
            self._read_header()
            self._read_metadata()
            self._read_tensors()
        except BrokenError as error:
            report.faults.append(error.fault)
        else:
            _check_places(self)

    # -- the three parts

    def _read_header(self) -> None:
        data = self.data
        if len(data) < HEADER.n_bytes:
            what = f"the file has {len(data)} bytes" if len(data) else "the file is empty"
            raise BrokenError("header", 0, f"needs {HEADER.n_bytes} bytes, {what}")
        self.header = HEADER.unpack(data)
        version = self.header["version"]
        if self.header["magic"] == MAGIC and version in (2 << 24, 3 << 24):
            raise BrokenError("version", 4, f"is {version >> 24} in big-endian order; big-endian GGUF is not supported")
        if self.header["magic"] == MAGIC and version == 1:
            raise BrokenError("version", 4, "is 1, which only the first weeks of GGUF wrote; versions 2 and 3 are read")
        for fault in HEADER.faults(self.header):
            raise BrokenError(fault.where, fault.offset or 0, fault.message)
        self.offset = HEADER.n_bytes

    def _read_metadata(self) -> None:
        n_pairs = self.header["metadata_kv_count"]
        self._check_count("metadata_kv_count", 16, n_pairs, _LEAST_PAIR)
        for i in range(n_pairs):
            start = self.offset
            key = self._text(f"key {i}")
            if key in self.metadata:
                raise BrokenError(key, start, "occurs twice")
            number = self._u32(key)
            self.metadata[key] = Value(self._type_name(number), self._value(number, key), start)
        self.alignment = self._alignment()

    def _read_tensors(self) -> None:
        n_tensors = self.header["tensor_count"]
        self._check_count("tensor_count", 8, n_tensors, _LEAST_TENSOR)
        descriptions = [self._description(i) for i in range(n_tensors)]
        self.data_offset = _aligned(self.offset, self.alignment)
        for d in descriptions:
            try:
                if d.name in self.tensors:
                    raise BrokenError(d.name, d.place, "occurs twice")
                self.tensors[d.name] = self._tensor(d)
            except BrokenError as error:
                self.report.faults.append(error.fault)

    # -- metadata values

    def _value(self, number: int, key: str) -> Any:
        if number == _STRING:
            return self._text(key)
        if number == _ARRAY:
            return self._array(key)
        dtype = np.dtype(_NUMBERS.get(number) or self._unknown(number, key))
        value = np.frombuffer(self._take(dtype.itemsize, key), dtype)[0]
        if number == _FLOAT32:
            return float(str(value))  # the shortest number that rounds to it: 1e-5, not 9.99999974e-06
        return bool(value) if number == _BOOL else value.item()

    def _array(self, key: str) -> Any:
        number, count = self._u32(key), self._u64(key)
        if number == _STRING:
            return self._texts(count, key)
        if number == _ARRAY:
            raise BrokenError(key, self.offset, "arrays inside arrays are not supported")
        dtype = np.dtype(_NUMBERS.get(number) or self._unknown(number, key))
        array = np.frombuffer(self._take(count * dtype.itemsize, key), dtype)
        return array.astype(np.bool_) if number == _BOOL else array

    def _type_name(self, number: int) -> str:
        if number != _ARRAY:
            return TYPE_NAMES.get(number, str(number))
        inner = struct.unpack_from("<I", self.data, self.offset)[0] if len(self.data) >= self.offset + 4 else -1
        return f"array of {TYPE_NAMES.get(inner, str(inner))}"

    def _unknown(self, number: int, key: str) -> str:
        raise BrokenError(key, self.offset, f"has the unknown type {number}")

    def _alignment(self) -> int:
        entry = self.metadata.get("general.alignment")
        if entry is None:
            return DEFAULT_ALIGNMENT
        value = entry.value
        if not isinstance(value, int) or isinstance(value, bool) or value < 8 or value & (value - 1) or value > 1 << 30:
            raise BrokenError("general.alignment", entry.offset, f"must be a power of two of at least 8, is {value}")
        return value

    # -- tensors

    def _description(self, i: int) -> _Description:
        start = self.offset
        name = self._text(f"tensor {i}")
        n_dims = self._u32(name)
        if n_dims > MAX_DIMS:
            raise BrokenError(name, start, f"has {n_dims} dimensions, at most {MAX_DIMS} are allowed")
        dims = struct.unpack(f"<{n_dims}Q", self._take(8 * n_dims, name))
        return _Description(start, name, tuple(reversed(dims)), self._u32(name), self._u64(name))

    def _tensor(self, d: _Description) -> TensorInfo:
        """The tensor, checked against the file. Raises BrokenError."""
        kind = BY_GGML.get(d.number)
        if kind is None:
            was = f" ({_REMOVED[d.number]}, which GGUF has dropped)" if d.number in _REMOVED else ""
            raise BrokenError(d.name, d.place, f"has the unknown data type {d.number}{was}")
        if 0 in d.shape:
            raise BrokenError(d.name, d.place, f"has the shape {list(d.shape)}: a dimension is 0", SHAPE)
        n_cols = d.shape[-1] if d.shape else 1
        n_bytes = kind.size(math.prod(d.shape)) if kind.block and n_cols % kind.block == 0 else None
        if n_bytes is None:
            text = f"rows of {n_cols} weights are no whole blocks of {kind.block} ({kind.name})"
            raise BrokenError(d.name, d.place, text, SHAPE)
        if d.relative % self.alignment:
            text = f"its offset {d.relative} is no multiple of the alignment {self.alignment}"
            raise BrokenError(d.name, d.place, text)
        end = self.data_offset + d.relative + n_bytes
        if end > len(self.data):
            cut = f"the file has {len(self.data)}; it was cut off, or the description is wrong"
            raise BrokenError(d.name, d.place, f"{kind.name} {list(d.shape)} ends at byte {end}, {cut}")
        return TensorInfo(d.name, kind, d.shape, self.data_offset + d.relative, n_bytes)

    # -- bytes

    def _check_count(self, where: str, offset: int, count: int, least: int) -> None:
        n_left = len(self.data) - self.offset
        if count * least > n_left:
            raise BrokenError(
                where, offset, f"{count} entries need at least {count * least} bytes, the file has {n_left} left"
            )

    def _take(self, n_bytes: int, what: str) -> memoryview:
        start, n_left = self.offset, len(self.data) - self.offset
        if n_bytes > n_left:
            raise BrokenError(what, start, f"needs {n_bytes} bytes, the file has {n_left} left")
        self.offset += n_bytes
        return self.data[start : self.offset]

    def _u32(self, what: str) -> int:
        return int(struct.unpack("<I", self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self._take(8, what))[0])

    def _text(self, what: str) -> str:
        return self._decoded(self._take(self._u64(what), what), what)

    def _texts(self, count: int, what: str) -> list[str]:
        """An array of strings; they come by the hundred thousand (tokens), so the loop is written out."""
        self._check_count(what, self.offset, count, 8)
        data, offset, end, unpack = self.data, self.offset, len(self.data), struct.Struct("<Q").unpack_from
        texts = []
        for i in range(count):
            n_bytes = unpack(data, offset)[0] if offset + 8 <= end else 8
            start = offset + 8
            if n_bytes > end - start:
                raise BrokenError(
                    f"{what}[{i}]", offset, f"needs {n_bytes} bytes, the file has {max(end - start, 0)} left"
                )
            offset = start + n_bytes
            texts.append(self._decoded(data[start:offset], what))
        self.offset = offset
        return texts

    def _decoded(self, data: memoryview, what: str) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise BrokenError(what, self.offset - len(data), f"is not UTF-8 at its byte {error.start}") from error


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _check_places(reading: _Reading) -> None:
    """The architecture is named, and no two tensors share bytes."""
    architecture, part = (reading.metadata.get(key) for key in ("general.architecture", "split.no"))
    if architecture is None and part is not None and isinstance(part.value, int) and part.value > 0:
        pass  # only the first part of a split model says what it is
    elif architecture is None or not isinstance(architecture.value, str):
        what = "is missing" if architecture is None else f"must be a string, is {architecture.type_name}"
        reading.report.fault(FORMAT, "general.architecture", None, f"{what}; without it no tensor has a meaning")
    end, before = 0, ""
    for info in sorted(reading.tensors.values(), key=lambda t: (t.offset, t.n_bytes)):
        if info.offset < end:
            reading.report.fault(
                FORMAT, printable(info.name), info.offset, f"overlaps {printable(before)}, which ends at byte {end}"
            )
        if info.offset + info.n_bytes > end:
            end, before = info.offset + info.n_bytes, info.name
