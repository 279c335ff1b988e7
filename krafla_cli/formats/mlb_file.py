"""Reading (memory-mapped, zero copy), writing (streaming) and validating .mlb files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import BinaryIO, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import FormatError
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.detect import check_kind
from krafla_cli.formats.faults import FORMAT, Fault, Report, fault_error
from krafla_cli.formats.layout import shown
from krafla_cli.formats.mlb import (
    ALIGNMENT,
    BLOCK,
    HEADER_BYTES,
    LAYER_LINEAR,
    LAYER_LOCAL_ROPE,
    LAYER_NO_ROPE,
    LAYER_WINDOW,
    LAYOUT,
    MAGIC,
    VERSION,
    BodyPlan,
    Header,
    TensorSpec,
)
from krafla_cli.formats.text import printable, printable_bytes
from krafla_cli.formats.values import first_not_finite, rows_text, zero_rows
from krafla_cli.formats.writer import AlignedWriter, Buffer, byte_view

_Q4_0_ZEROS = 0x88  # two weights of level 8 - 8
_SCAN_BYTES = 1 << 20  # fits the second-level cache, so that a scan runs at the speed of memory
_Scalar = TypeVar("_Scalar", bound=np.generic)
QuantArray: TypeAlias = npt.NDArray[np.int8] | npt.NDArray[np.uint8]
ScaleArray: TypeAlias = npt.NDArray[np.float16] | npt.NDArray[np.float32]
_KNOWN_FLAGS = LAYER_WINDOW | LAYER_LOCAL_ROPE | LAYER_NO_ROPE | LAYER_LINEAR


@dataclass(frozen=True)
class QuantizedArray:
    """A quantized matrix as it lies in the file, [rows, cols].

    ``q``: int8 [rows, cols] (Q8_0) or uint8 [rows, cols / 2] (Q4_0, nibbles); ``d``: float16 or float32
    [rows, cols / 32].
    """

    encoding: str
    q: QuantArray
    d: ScaleArray

    @property
    def shape(self) -> tuple[int, int]:
        return (self.d.shape[0], self.d.shape[1] * BLOCK)


class MlbFile:
    """An open model: ``header``, ``tensors`` by name, and their arrays as views of the mapped file."""

    def __init__(self, path: str | os.PathLike[str], data: memoryview, plan: BodyPlan) -> None:
        self.path = str(path)
        self.data = data
        self.plan = plan
        self.header = plan.header

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.plan.specs()}

    @property
    def n_weights(self) -> int:
        """Weights of all tensors."""
        return sum(spec.n_weights for spec in self.tensors.values() if spec.role != "layer_flags")

    @property
    def bits_per_weight(self) -> float:
        """Bits of the whole file for each weight."""
        return 8 * self.plan.end / self.n_weights

    def quantized(self, name: str) -> QuantizedArray:
        """The quantized matrix ``name`` ("tok_emb", "layers.0.wq"), zero copy."""
        spec = self.tensors[name]
        rows, cols = spec.shape
        if spec.encoding == "q8_0":
            q: QuantArray = self._view(spec.offset, np.int8, (rows, cols))
        else:
            q = self._view(spec.offset, np.uint8, (rows, cols // 2))
        d: ScaleArray = (
            self._view(spec.scale_offset, np.float16, (rows, cols // BLOCK))
            if self.header.scale_f16
            else self._view(spec.scale_offset, np.float32, (rows, cols // BLOCK))
        )
        return QuantizedArray(spec.encoding, q, d)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """The F32 array ``name`` ("final_norm", "layers.0.bq") in its shape, zero copy."""
        spec = self.tensors[name]
        return self._view(spec.offset, np.float32, spec.shape)

    def _view(self, offset: int, dtype: type[_Scalar], shape: tuple[int, ...]) -> npt.NDArray[_Scalar]:
        return np.frombuffer(self.data, dtype, math.prod(shape), offset).reshape(shape)


def open_mlb(path: str | os.PathLike[str], scan: bool = True) -> MlbFile:
    """Opens a model as the specification's loader does.

    ``scan`` looks at every Q8_0 quant for -128, at the speed of memory. Raises FileError (cannot be opened),
    FormatError or ShapeError, naming the first fault.
    """
    data = map_file(path)
    check_kind(path, data, "mlb")
    report = Report(str(path), "mlb")
    plan = _check_structure(data, report)
    if plan is not None and report.valid and scan:
        report.faults.extend(_q8_faults(data, plan))
    report.raise_first()
    if plan is None:  # unreachable: no plan without a fault
        raise FormatError(f"{printable(str(path))}: no model")
    return MlbFile(path, data, plan)


def validate(path: str | os.PathLike[str]) -> Report:
    """Every fault of the file, as far as going on is safe, with warnings about all that a loader overlooks.

    Raises FileError when the file cannot be opened.
    """
    data = map_file(path)
    report = Report(str(path), "mlb")
    plan = _check_structure(data, report)
    if plan is not None:
        report.faults.extend(_q8_faults(data, plan))
        _warn_about_header(data, plan, report)
        _warn_about_padding(data, plan, report)
        _warn_about_values(MlbFile(path, data, plan), report)
    return report


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def _check_structure(data: memoryview, report: Report) -> BodyPlan | None:
    """Adds the faults of header, layer flags and size; returns the body's plan if the file backs all of it."""
    if not _check_start(data, report):
        return None
    header = Header.from_bytes(data)
    report.faults.extend(LAYOUT.faults(header.values))
    if not report.valid:
        return None
    if header.layer_flags:
        if not _check_flags(data, header, report):
            return None
        header = replace(header, flags=bytes(data[HEADER_BYTES : HEADER_BYTES + header.n_layers]))
    return _check_size(data, BodyPlan(header), report)


def _check_start(data: memoryview, report: Report) -> bool:
    """Length, magic and version: without them nothing else has a meaning."""
    if len(data) < HEADER_BYTES:
        what = f"the file has {len(data)} bytes" if len(data) else "the file is empty"
        report.fault(FORMAT, "header", 0, f"needs {HEADER_BYTES} bytes, {what}")
    elif bytes(data[:4]) != MAGIC:
        report.fault(FORMAT, "magic", 0, f'must be "MLB1", is "{printable_bytes(bytes(data[:4]))}"')
    elif (version := LAYOUT["version"].unpack(data)) != VERSION:
        report.fault(FORMAT, "version", 4, f"must be {VERSION}, is {version}; a newer mlb may read it")
    return report.valid


def _check_flags(data: memoryview, header: Header, report: Report) -> bool:
    """The layer-flags array: present, known bits, and combinations that mean something."""
    if len(data) < HEADER_BYTES + header.n_layers:
        report.faults.append(_short(data, "layer_flags", HEADER_BYTES, HEADER_BYTES + header.n_layers))
        return False
    for layer, flags in enumerate(data[HEADER_BYTES : HEADER_BYTES + header.n_layers]):
        rule = flag_rule(header, flags)
        if rule:
            report.fault(FORMAT, f"layer_flags[{layer}]", HEADER_BYTES + layer, f"{rule}, is {flags}")
    return report.valid


def flag_rule(header: Header, flags: int) -> str | None:
    """The rule that a byte of the layer flags breaks, if any."""
    if flags & ~_KNOWN_FLAGS:
        return "bits other than 1, 2, 4, 8 must be 0"
    if flags & LAYER_LOCAL_ROPE and flags & LAYER_NO_ROPE:
        return "local RoPE (2) and no RoPE (4) cannot be combined"
    if flags & LAYER_LINEAR and flags != LAYER_LINEAR:
        return "linear attention (8) cannot be combined with other bits"
    if flags & LAYER_LINEAR and not header.lin_k_heads:
        return "linear attention (8) needs lin_k_heads > 0"
    if flags & LAYER_LOCAL_ROPE and not header.rope_local_theta:
        return "local RoPE (2) needs rope_local_theta > 0"
    return None


def _short(data: memoryview, where: str, offset: int, end: int) -> Fault:
    return Fault(
        FORMAT, where, offset, f"ends at byte {end}, the file has {len(data)}; it was cut off, or the header is wrong"
    )


def _check_size(data: memoryview, plan: BodyPlan, report: Report) -> BodyPlan | None:
    if plan.end <= len(data):
        return plan
    first = next(s for s in plan.specs() if s.end > len(data))
    report.faults.append(_short(data, first.name, first.offset, first.end))
    report.fault(FORMAT, "file", None, f"{len(data)} bytes, the header implies {plan.end}")
    return None


def _q8_faults(data: memoryview, plan: BodyPlan) -> Iterator[Fault]:
    """A fault for each Q8_0 tensor that holds -128: its first."""
    for spec in plan.specs():
        if spec.encoding != "q8_0":
            continue
        first = _first_minus_128(np.frombuffer(data, np.int8, spec.n_bytes, spec.offset))
        if first is not None:
            row, col = divmod(first, spec.shape[1])
            yield Fault(
                FORMAT,
                spec.name,
                spec.offset + first,
                f"Q8_0 quant at row {row}, column {col} is -128, must be -127 to 127",
            )


def _first_minus_128(q: npt.NDArray[np.int8]) -> int | None:
    for start in range(0, len(q), _SCAN_BYTES):
        chunk = q[start : start + _SCAN_BYTES]
        if chunk.min() == -128:
            return start + int(np.argmax(chunk == -128))
    return None


def _warn_about_header(data: memoryview, plan: BodyPlan, report: Report) -> None:
    last = LAYOUT.fields[-1]
    used = last.offset + last.n_bytes
    if any(data[used:HEADER_BYTES]):
        report.warn("header padding", used, "is not zero; a newer version may give it a meaning")
    header = plan.header
    if header.lin_k_heads and not any(header.is_linear(i) for i in range(header.n_layers)):
        report.warn("lin_k_heads", LAYOUT["lin_k_heads"].offset, "is set, but no layer is flagged as linear")
    if header.rope_type == 0:
        for name in ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_orig_max_seq"):
            if getattr(header, name):
                value = shown(getattr(header, name))
                report.warn(name, LAYOUT[name].offset, f"is {value}, but rope_type is 0 (plain)")


def _warn_about_values(model: MlbFile, report: Report) -> None:
    """The specification allows any number in norms, biases and scales; these make every answer garbage."""
    for spec in model.tensors.values():
        if spec.encoding == "f32":
            bad = first_not_finite(model.float32(spec.name).reshape(-1))
            if bad is not None:
                report.warn(spec.name, spec.offset + 4 * bad, f"element {bad} is NaN or infinite")
        elif spec.is_quantized:
            _warn_about_matrix(model.quantized(spec.name), spec, report)


def _warn_about_matrix(matrix: QuantizedArray, spec: TensorSpec, report: Report) -> None:
    scales = matrix.d.reshape(-1)
    bad = first_not_finite(scales.view(np.uint16) if scales.dtype == np.float16 else scales)
    if bad is not None:
        row, block = divmod(bad, matrix.d.shape[1])
        offset = spec.scale_offset + bad * scales.itemsize
        report.warn(spec.name, offset, f"the scale of row {row}, block {block} is NaN or infinite")
    rows = zero_rows(matrix.q, 0 if spec.encoding == "q8_0" else _Q4_0_ZEROS, matrix.d)
    if rows:
        report.warn(spec.name, spec.offset, rows_text(rows))


def _warn_about_padding(data: memoryview, plan: BodyPlan, report: Report) -> None:
    for spec in plan.specs():
        ends = [(spec.offset + spec.n_bytes, spec.name)]
        if spec.is_quantized:
            ends.append((spec.end, f"{spec.name} scales"))
        for end, name in ends:
            if any(data[end : min(-(-end // ALIGNMENT) * ALIGNMENT, len(data))]):
                report.warn(f"padding after {name}", end, "is not zero")
    padded_end = -(-plan.end // ALIGNMENT) * ALIGNMENT
    if len(data) > padded_end:
        report.warn("file", padded_end, f"{len(data) - padded_end} bytes after the last array belong to nothing")


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class MlbWriter:
    """Writes a model front to back: the header at once, then each tensor of ``tensors(header)`` in its order.

    Wrong order and wrong sizes are defects of the caller and raise ValueError. ``finish`` checks that all is there.
    """

    def __init__(self, file: BinaryIO, header: Header) -> None:
        faults = list(LAYOUT.faults(header.values))
        if faults:
            raise fault_error("the model to be written", faults[0], len(faults) - 1)
        self.header = header
        self._out = AlignedWriter(file, ALIGNMENT)
        self._specs = BodyPlan(header).specs()
        self._next = next(self._specs, None)
        self._out.write(header.to_bytes())
        if header.layer_flags:
            self.write("layer_flags", header.flags)

    def write(self, name: str, *arrays: Buffer, complete_rows: Iterable[int] = ()) -> None:
        """Appends tensor ``name``: one array (F32), or quants and scales, C-contiguous.

        ``complete_rows``: where the arrays are still being filled, the numbers of rows that are complete, ascending and
        each as soon as it is true; the first array's rows are written meanwhile, all else at the end of it.
        """
        spec = self._next
        if spec is None or spec.name != name:
            raise ValueError(f"{name} written where {spec.name if spec else 'the end'} belongs")
        sizes = (spec.n_bytes, spec.scale_bytes) if spec.is_quantized else (spec.n_bytes,)
        given = tuple(byte_view(a).nbytes for a in arrays)
        if given != sizes:
            raise ValueError(f"{name}: {given} bytes, the header implies {sizes}")
        first, *others = arrays
        self._out.pad()
        n_written = 0
        for n_rows in complete_rows:
            self._out.write(first[n_written:n_rows])
            n_written = n_rows
        self._out.write(first[n_written:])
        for array in others:
            self._out.pad()
            self._out.write(array)
        self._next = next(self._specs, None)

    def finish(self, pad_last: bool = True) -> str:
        """Ends the file, with its last array padded or not; returns the SHA-256 of all bytes in hexadecimal."""
        if self._next is not None:
            raise ValueError(f"{self._next.name} was never written")
        if pad_last:
            self._out.pad()
        return self._out.sha256
