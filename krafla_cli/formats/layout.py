"""Header layouts as data: one table drives reading, writing, validating and inspecting a format."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from krafla_cli.formats.faults import FORMAT, Fault
from krafla_cli.formats.text import printable_bytes

Values = Mapping[str, Any]
# A rule is given the field's value and all header values, and says whether the value is allowed.
Check = Callable[[Any, Values], bool]


@dataclass(frozen=True)
class Rule:
    """A condition on one field: its check, its wording ("must be a multiple of 32"), and the status when broken."""

    check: Check
    text: str
    status: str = FORMAT


@dataclass(frozen=True)
class Field:
    """One field of a little-endian header. ``code`` is its struct code without byte order: "I", "f", "4s", "8H"."""

    name: str
    offset: int
    code: str
    meaning: str
    rules: tuple[Rule, ...] = ()

    @property
    def n_bytes(self) -> int:
        return struct.calcsize("<" + self.code)

    @property
    def is_array(self) -> bool:
        return len(self.code) > 1 and not self.code.endswith("s")

    def unpack(self, data: bytes | memoryview) -> Any:
        values = struct.unpack_from("<" + self.code, data, self.offset)
        return values if self.is_array else values[0]


class Layout:
    """A header of ``n_bytes`` made of ``fields``; bytes that no field covers are zero."""

    def __init__(self, n_bytes: int, fields: tuple[Field, ...]) -> None:
        self.n_bytes = n_bytes
        self.fields = fields
        self._by_name = {f.name: f for f in fields}

    def __getitem__(self, name: str) -> Field:
        return self._by_name[name]

    def unpack(self, data: bytes | memoryview) -> dict[str, Any]:
        """All values by name; ``data`` holds at least ``n_bytes`` (the caller has checked)."""
        return {f.name: f.unpack(data) for f in self.fields}

    def pack(self, values: Values) -> bytes:
        """The header's bytes. ``values`` holds every field."""
        out = bytearray(self.n_bytes)
        for f in self.fields:
            value = values[f.name]
            struct.pack_into("<" + f.code, out, f.offset, *(value if f.is_array else (value,)))
        return bytes(out)

    def faults(self, values: Values) -> Iterator[Fault]:
        """The broken rules, in the order of the table; at most one a field, its first."""
        for f in self.fields:
            broken = next((r for r in f.rules if not r.check(values[f.name], values)), None)
            if broken is not None:
                yield Fault(broken.status, f.name, f.offset, f"{broken.text}, is {shown(values[f.name])}")


def header_field(offset: int, code: str, meaning: str, *rules: Rule, default: Any = 0) -> Any:
    """A dataclass field that is also a row of a header's table; see :func:`layout_of`."""
    return dataclasses.field(
        default=default, metadata={"offset": offset, "code": code, "meaning": meaning, "rules": rules}
    )


def layout_of(header_class: Any, n_bytes: int) -> Layout:
    """The layout of a dataclass whose fields are :func:`header_field` (others are no part of the header)."""
    rows = [(f.name, f.metadata) for f in dataclasses.fields(header_class) if f.metadata]
    return Layout(n_bytes, tuple(Field(name, m["offset"], m["code"], m["meaning"], m["rules"]) for name, m in rows))


def shown(value: Any) -> str:
    """A header value for an error message; floats with the digits that identify a float32."""
    if isinstance(value, bytes):
        return f'"{printable_bytes(value)}"'
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


def is_finite(value: float, _: Values) -> bool:
    """Rule check: neither NaN nor infinite."""
    return math.isfinite(value)


def one_of(*allowed: Any) -> Check:
    """Rule check: the value is one of ``allowed``."""
    return lambda value, _: value in allowed


def in_range(low: float, high: float) -> Check:
    """Rule check: ``low`` <= value <= ``high``."""
    return lambda value, _: low <= value <= high
