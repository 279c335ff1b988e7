"""What validation finds: faults with a status, a place, the value found and the rule that it breaks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from krafla_cli.errors import MlbError, from_fault
from krafla_cli.formats.text import printable

IO = "ML_E_IO"
FORMAT = "ML_E_FORMAT"
SHAPE = "ML_E_SHAPE"
WARNING = "WARNING"
STRICT = "STRICT"  # of a warning that counts as a fault; no loader has this status


@dataclass(frozen=True)
class Fault:
    """One broken rule. ``offset`` is the byte offset in the file of ``where`` (a field or a tensor)."""

    status: str
    where: str
    offset: int | None
    message: str

    def __str__(self) -> str:
        place = f"{self.where} at offset {self.offset}" if self.offset is not None else self.where
        return f"{place}: {self.message}"


class BrokenError(Exception):
    """A part of a file, or all that follows, cannot be used; ``fault`` says why. Only inside readers."""

    def __init__(self, where: str, offset: int, message: str, status: str = FORMAT) -> None:
        super().__init__(message)
        self.fault = Fault(status, printable(where), offset, message)


@dataclass
class Report:
    """The result of validating one file: ``faults`` make it invalid, ``warnings`` do not (unless strict)."""

    path: str
    kind: str
    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        return not self.faults

    @property
    def status(self) -> str:
        """ "ML_OK", or the status of the first fault, which is the one a loader would stop at."""
        return self.faults[0].status if self.faults else "ML_OK"

    def fault(self, status: str, where: str, offset: int | None, message: str) -> None:
        """Records a fault."""
        self.faults.append(Fault(status, where, offset, message))

    def warn(self, where: str, offset: int | None, message: str) -> None:
        """Records a warning."""
        self.warnings.append(Fault(WARNING, where, offset, message))

    def strict(self) -> Report:
        """The same report, its warnings as faults of the status STRICT."""
        return Report(self.path, self.kind, [*self.faults, *(replace(w, status=STRICT) for w in self.warnings)])

    def raise_first(self) -> None:
        """Raises the first fault as an exception of its status, if there is one."""
        if self.faults:
            raise fault_error(self.path, self.faults[0], len(self.faults) - 1)


def fault_error(path: str, fault: Fault, n_more: int = 0) -> MlbError:
    """``fault`` as an exception whose text starts with the file's name."""
    more = f" ({n_more} more: `mlb validate` lists them)" if n_more else ""
    return from_fault(fault.status, f"{printable(path)}: {fault}{more}")
