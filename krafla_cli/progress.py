"""How library code tells a person what goes on, without printing: it calls a Progress that the caller supplies."""

from __future__ import annotations


class Progress:
    """Receives progress and remarks; this base class ignores them all. The command line's draws bars on stderr."""

    def start(self, what: str, total: int, unit: str) -> None:
        """A piece of work of ``total`` units ("B" for bytes, "tok" for tokens, ...) begins."""

    def advance(self, n: int) -> None:
        """``n`` more units are done."""

    def finish(self) -> None:
        """The piece of work is over."""

    def info(self, text: str) -> None:
        """Something worth knowing: a default that was chosen, a part that was left out."""

    def detail(self, text: str) -> None:
        """Something only for those who asked for details (``--verbose``)."""

    def warn(self, text: str) -> None:
        """Something that may not be what the user wants."""


SILENT = Progress()
