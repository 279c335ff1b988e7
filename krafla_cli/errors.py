"""The one hierarchy of expected failures.

Everything that a user can cause (a bad file, a full disk, an unsupported model, a wrong option) is an
:class:`MlbError`; the command line prints its text as one line and ends with its ``exit_code``. Anything else is a
defect of this tool.
``status`` is the loader's status of the .mlb specification ("Validation done by the loader").
"""

from __future__ import annotations

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class MlbError(Exception):
    """Base of every expected failure; its text is one line that says what, where and what to do."""

    status: str = "ML_E_FORMAT"
    exit_code: int = EXIT_FAILURE


class FileError(MlbError):
    """A file cannot be opened, read, created or written (ML_E_IO)."""

    status = "ML_E_IO"


class FormatError(MlbError):
    """The bytes of a file break the rules of its format (ML_E_FORMAT)."""

    status = "ML_E_FORMAT"


class ShapeError(FormatError):
    """A dimension is zero, over its limit, or does not fit another one (ML_E_SHAPE)."""

    status = "ML_E_SHAPE"


class UnsupportedError(MlbError):
    """A correct input that the target format or this tool cannot represent; the text names the part."""


class DataError(MlbError):
    """Values that cannot be processed: NaN, infinite, or beyond what a scale can hold."""


class InputError(MlbError):
    """What the user gave does not fit the model: a prompt that is too long, ids outside the vocabulary."""


class UsageError(MlbError):
    """Options that contradict each other or ask for what does not exist."""

    exit_code = EXIT_USAGE


def os_reason(error: OSError) -> str:
    """The operating system's words for ``error`` without the Python prefix ("No such file or directory")."""
    return error.strerror or type(error).__name__


def from_fault(status: str, message: str) -> MlbError:
    """The exception class that carries ``status``, holding ``message``."""
    classes: dict[str, type[MlbError]] = {c.status: c for c in (FileError, FormatError, ShapeError)}
    return classes[status](message)
