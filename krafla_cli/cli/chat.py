"""``mlb run --chat``: the terminal around a conversation, and the printing of replies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from krafla_cli.cli.common import note, speed
from krafla_cli.errors import InputError, MlbError

if TYPE_CHECKING:
    from krafla_cli.runtime.chat import Chat, Piece

_PROMPT, _MORE = "> ", "... "
_QUOTES = '"""'
_COMMAND = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
_HELP = '''/reset        forget the conversation; the system message stays
/system TEXT  set the system message; without TEXT, remove it
/save FILE    write the conversation as JSON
/stats        what the last reply took
/quit         leave (Ctrl-D does, too)
Ctrl-C ends a reply. Several lines: paste them, or write """ before and after them.'''
_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"


class ReplyPrinter:
    """Prints a reply on stdout while it comes: on a terminal safe, with its thinking dimmed; plain when piped."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._can_dim = self._on_terminal and os.environ.get("TERM", "dumb") != "dumb"

    def show(self, pieces: Iterable[Piece]) -> str:
        """Prints ``pieces`` and a line end after them; returns their text."""
        from krafla_cli.formats.text import terminal_text

        text, is_dim = "", False
        try:
            for piece in pieces:
                if self._can_dim and piece.is_thinking != is_dim:
                    is_dim = piece.is_thinking
                    self._write(_DIM if is_dim else _NORMAL)
                self._write(terminal_text(piece.text) if self._on_terminal else piece.text)
                text += piece.text
        finally:
            if is_dim:
                self._write(_NORMAL)
        if text:
            self._write("\n")
        return text

    def _write(self, text: str) -> None:
        click.echo(text, nl=False, color=True)  # without it, click takes escape sequences out of piped text


class LineReader:
    """Reads messages from stdin: with line editing, history and pasted lines on a terminal, a line each elsewhere."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        if self.is_interactive:
            self._set_up_editing()

    @staticmethod
    def _set_up_editing() -> None:
        with contextlib.suppress(ImportError):  # input() edits lines where the module is there
            import readline

            # Python turns it off: its own prompt cannot take several lines at once, this one can.
            readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str:
        """The next message. Raises EOFError at the end, InputError: no UTF-8, or a block that nothing ends."""
        line = self._line(_PROMPT)
        if not line.startswith(_QUOTES):
            return line
        block = line.removeprefix(_QUOTES)
        while not block.rstrip().endswith(_QUOTES):
            try:
                block += "\n" + self._line(_MORE)
            except EOFError as error:
                raise InputError(f"the message that {_QUOTES} begins has no {_QUOTES} at its end") from error
        return block.rstrip().removesuffix(_QUOTES).strip("\n")

    def _line(self, prompt: str) -> str:
        try:
            if self.is_interactive and not sys.stdout.isatty():
                click.echo(prompt, nl=False, err=True)
            return input(prompt if self.is_interactive and sys.stdout.isatty() else "")
        except UnicodeDecodeError as error:
            raise InputError(f"the input is not UTF-8 text: a byte is 0x{error.object[error.start]:02x}") from error


class Session:
    """The loop: reads a message or a command, shows the reply, until the input ends.

    On a terminal an error is shown and the conversation goes on; elsewhere it ends the program.
    """

    def __init__(self, chat: Chat, force: bool, show_stats: bool) -> None:
        self._chat = chat
        self._force = force
        self._show_stats = show_stats
        self._reader = LineReader()
        self._printer = ReplyPrinter()

    def run(self) -> None:
        """Talks until Ctrl-D, /quit or the end of a pipe."""
        if self._reader.is_interactive:
            note("/help shows the commands. Ctrl-C ends a reply, Ctrl-D the program.")
        is_going = True
        while is_going:
            try:
                is_going = self._turn()
            except EOFError:
                if self._reader.is_interactive:
                    click.echo(err=True)
                return
            except MlbError as error:
                if not self._reader.is_interactive:
                    raise
                _show_error(error)
            except KeyboardInterrupt:
                if not self._reader.is_interactive:
                    raise
                click.echo(err=True)  # the line that was begun is given up

    def _turn(self) -> bool:
        """One message or command; False when it was the last."""
        text = self._reader.read()
        match = _COMMAND.fullmatch(text.strip()) if text.startswith("/") else None
        if match:
            return self._command(match[1], (match[2] or "").strip())
        if text.strip():
            self._reply(text)
        return True

    def _reply(self, text: str) -> None:
        with self._interruptible():
            self._printer.show(self._chat.reply(text))
        report, engine = self._chat.report, self._chat.model.engine
        if report.stop_reason == "interrupted":
            note("[interrupted]" if report.ids else "[interrupted before the reply; the message is not kept]")
        elif report.stop_reason == "context":
            note(f"the context of {engine.n_ctx} positions is full: /reset starts anew, --ctx makes it larger")
        elif report.stop_reason == "length":
            note(f"[ended after {len(report.ids)} tokens, -n]")
        if self._show_stats:
            click.echo(self._stats(), err=True)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C ends the reply between two steps of the engine, whose state stays whole."""
        if not self._reader.is_interactive:
            yield
            return
        before = signal.signal(signal.SIGINT, lambda _signum, _frame: self._chat.interrupt())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _command(self, name: str, argument: str) -> bool:
        match name:
            case "quit" | "exit":
                return False
            case "help":
                click.echo(_HELP, err=True)
            case "reset":
                self._chat.reset()
                note("[the conversation is forgotten]")
            case "system":
                self._chat.set_system(argument)
                note(f"[system message {'set' if argument else 'removed'}]")
            case "stats":
                click.echo(self._stats(), err=True)
            case "save":
                self._save(argument)
            case _:
                raise InputError(f"there is no command /{name}; /help shows them. A space before the / makes it text")
        return True

    def _save(self, name: str) -> None:
        from krafla_cli.formats.atomic import write_bytes
        from krafla_cli.formats.sidecar import files_beside
        from krafla_cli.formats.text import printable

        if not name:
            raise InputError("/save needs the name of a file")
        given = self._chat.model.companions
        read = (given.model, *files_beside(given.model), *([given.tokenizer] if given.tokenizer else []))
        document = {"model": given.model.name, "messages": self._chat.messages}
        target = Path(name).expanduser()
        if target.exists() and not self._force:
            raise InputError(
                f"{printable(str(target))} exists already; give another name, or start the chat with --force"
            )
        data = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        write_bytes(target, data.encode(), self._force, read)
        note(f"[wrote {len(self._chat.messages)} messages to {printable(str(target))}]")

    def _stats(self) -> str:
        report, engine = self._chat.report, self._chat.model.engine
        parts = [
            f"{engine.position} of {engine.n_ctx} positions",
            f"{report.cached_tokens} tokens were in the cache",
            speed("prompt", report.prompt_tokens, report.prefill_seconds),
            speed("reply", len(report.ids), report.decode_seconds),
            f"{engine.name} engine, {engine.activations} activations, {engine.kv} cache",
            f"seed {self._chat.sampler.seed}",
            f"ended by {report.stop_reason}" if report.stop_reason else "no reply yet",
        ]
        return "; ".join(parts)


def _show_error(error: MlbError) -> None:
    from krafla_cli.formats.text import printable

    click.echo(f"mlb: error: {printable(str(error), 4000)}", err=True)
