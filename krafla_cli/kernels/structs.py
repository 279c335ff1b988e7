"""What compiled functions are given: structs of pointers and numbers, laid out once and shared by Python and kernels.

Every field takes 8 bytes. A field's type is a code: "i64"; "f64"; or a pointer to elements "f64*", "f32*", "f16*",
"i8*", "u8*", "i16*", "i32*", "i64*". In a kernel a struct is an argument ``a`` whose fields are read as ``a.name``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.int64]
Value: TypeAlias = "int | float | npt.NDArray[np.generic]"


@dataclass(frozen=True)
class Struct:
    """A layout: field names with their type codes, in order."""

    name: str
    fields: tuple[tuple[str, str], ...]

    def pack(self, **values: Value) -> Words:
        """The struct's words, [fields]. An array gives its address: the caller keeps it alive. Absent fields are 0.

        Raises ValueError for a field that the layout has not.
        """
        words = np.zeros(len(self.fields), np.int64)
        unknown = values.keys() - {name for name, _ in self.fields}
        if unknown:
            raise ValueError(f"{self.name} has no field {', '.join(sorted(unknown))}")
        for i, (name, code) in enumerate(self.fields):
            words[i] = _word(values.get(name, 0), code)
        return words

    def index(self, name: str) -> int:
        """The place of field ``name`` among the words."""
        return [n for n, _ in self.fields].index(name)


def struct(name: str, **fields: str) -> Struct:
    """A layout with ``fields`` in the order given."""
    return Struct(name, tuple(fields.items()))


def address(array: npt.NDArray[np.generic]) -> int:
    """Where the elements of ``array`` are."""
    return int(array.__array_interface__["data"][0])


def _word(value: Value, code: str) -> int:
    if code == "f64":
        return int(np.float64(value).view(np.int64))
    if isinstance(value, np.ndarray):
        return address(value)
    return int(value)
