"""The command ``mlb`` (and ``python -m krafla_cli``). Signals end it without a traceback from the first import on."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def main() -> None:
    """Runs the command line and ends the process with the exit code of the README's table."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _again
    try:
        from krafla_cli.cli import main as run

        run()
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else None
        if code not in (_INTERRUPTED, _TERMINATED):
            if not _comes_from_interrupt(error):
                raise
            code = _INTERRUPTED
            sys.stderr.write("mlb: error: interrupted\n")
        _end(code)


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    # As an exception it runs every clean-up on its way out, so that no temporary file stays behind.
    raise SystemExit(_TERMINATED)


def _again(args: UnraisableHookArgs) -> None:
    """A signal that arrived where Python drops exceptions (inside a callback) is raised anew outside of it.

    Not from here, where it would be dropped again: a new thread runs when this one has gone on.
    """
    if issubclass(args.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(signal.raise_signal, (signal.SIGINT,))
    elif issubclass(args.exc_type, SystemExit):
        _thread.start_new_thread(signal.raise_signal, (signal.SIGTERM,))
    else:
        sys.__unraisablehook__(args)


def _comes_from_interrupt(error: BaseException | None) -> bool:
    """Whether an interrupt is behind ``error``: libraries turn it into errors of their own while they are imported."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _end(code: int) -> None:
    """Ends the process at once: everything is cleaned up, and libraries' threads and exit handlers take their time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
