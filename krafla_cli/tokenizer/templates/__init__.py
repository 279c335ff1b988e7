"""Chat templates of the families, for models that come without one: ``--template NAME`` (or a file)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from krafla_cli.errors import FileError, UsageError, os_reason
from krafla_cli.formats.text import printable

NAMES = ("chatml", "llama3", "gemma", "mistral", "smollm", "qwen3.5")
_MAX_BYTES = 4 << 20


def builtin(name: str) -> str:
    """The built-in template ``name``, one of NAMES."""
    return resources.files(__name__).joinpath(f"{name}.jinja").read_text("utf-8")


def read_template(name: str) -> str:
    """A built-in template by its name, or the file ``name``. Raises UsageError (neither), FileError."""
    if name in NAMES:
        return builtin(name)
    path = Path(name)
    if not path.exists():
        raise UsageError(f"{printable(name)} is no file, and the built-in templates are {', '.join(NAMES)}")
    try:
        with path.open("rb") as f:
            data = f.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise FileError(f"{printable(name)}: a chat template has at most {_MAX_BYTES} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise FileError(f"cannot read {printable(name)}: {os_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{printable(name)}: not UTF-8 at byte {error.start}") from error
