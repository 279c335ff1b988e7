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


EXIT_FAILURE = 1  # as in errors.py, which is not imported yet
_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
_on_bus_error: object = None  # kept as long as the process lives


def main() -> None:
    """Runs the command line and ends the process with the exit code of the README's table."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _again
    _catch_bus_errors()
    if not _streams_are_open():
        _end(EXIT_FAILURE)
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


def _streams_are_open() -> bool:
    """Whether there is a standard output. A closed stream becomes the null device: the next file opened would take its
    number, and its place for whatever is printed."""
    closed = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.append(os.open(os.devnull, os.O_RDWR))  # the lowest number that is free
    if 1 in closed:
        os.write(2, b"mlb: error: standard output is closed; send it to /dev/null instead\n")
    return 1 not in closed


def _catch_bus_errors() -> None:
    """Reading a mapped file beyond its end, because somebody cut it short meanwhile, is SIGBUS.

    The system would end the process without a word, and a handler of Python's own never runs: the instruction that
    failed is tried again first. This one runs inside of it, on whatever thread that is, and does not come back.
    """
    import ctypes

    global _on_bus_error
    _on_bus_error = ctypes.CFUNCTYPE(None, ctypes.c_int)(_say_that_a_file_shrank)
    ctypes.CDLL(None).signal(int(signal.SIGBUS), _on_bus_error)


def _say_that_a_file_shrank(_signum: int) -> None:
    text = "a file was cut short while it was in use (SIGBUS); replace files by renaming, and run this again"
    os.write(2, f"mlb: error: {text}\n".encode())
    os._exit(EXIT_FAILURE)


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
