"""``mlb run --chat`` in a terminal (a pseudo-terminal) and from a pipe, and the options of chats for ``-p``."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from krafla_cli.cli import invoke
from tests.cli.test_run import _favouring
from tests.helpers.runnable import small_tokenizer, write_runnable

READY, DEADLINE_S = "> ", 60
TOKENIZER = small_tokenizer()
BOT = 2


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *args: object) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "krafla_cli", "run", *map(str, args), "--chat", "--engine", "reference"]
        environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull, "PYTHONUTF8": "1"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, preexec_fn=_own
        )
        os.close(slave)
        self.output = ""

    def interrupt_until(self, text: str) -> str:
        """Ctrl-C, and what comes up to ``text``.

        A signal that arrives just before the program waits for a line is seen only after it: one presses again.
        """
        self.types("\x03")
        return self.until(text, again="\x03")

    def until(self, text: str, again: str = "") -> str:
        """What came up to ``text``, waiting for it; ``again`` is typed whenever nothing comes for a while."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            if not select.select([self.master], [], [], 5)[0]:
                self.types(again)
            else:
                try:
                    data = os.read(self.master, 65536)
                except OSError:  # the program has ended
                    data = b""
                assert data, self.output
                self.output += data.decode()
        before, _, self.output = self.output.partition(text)
        return before

    def types(self, text: str) -> None:
        os.write(self.master, text.encode())

    def ends(self) -> int:
        """The exit code."""
        while select.select([self.master], [], [], 0.1)[0] or self.process.poll() is None:
            try:
                self.output += os.read(self.master, 65536).decode()
            except OSError:
                break
        return self.process.wait(DEADLINE_S)


def _own() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*args: object) -> Terminal:
        started.append(Terminal(*args))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.master)


def _saying(tmp_path: Path, text: str) -> Path:
    """A model that says ``text`` in every reply; no token may be in it twice."""
    ids = TOKENIZER.encode(text).ids
    assert len(set(ids)) == len(ids)
    return _favouring(tmp_path, [BOT, *ids, 0])


def _endless(tmp_path: Path) -> Path:
    a, b = TOKENIZER.encode("xy").ids
    return _favouring(tmp_path, [BOT, a, b, a], max_seq=1 << 16)


def test_a_conversation_in_a_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal(_saying(tmp_path, "the cat"))
    assert "/help shows the commands" in chat.until(READY)
    # Line editing: x is taken back. History: the arrow brings the line again.
    chat.types("onex\x7f\r")
    chat.until("the cat\r\n")
    chat.until(READY)
    chat.types("\x1b[A!\r")
    chat.until("the cat\r\n")
    chat.until(READY)
    # Pasted lines are one message.
    chat.types("\x1b[200~two\rlines\x1b[201~\r")
    chat.until("the cat\r\n")
    chat.until(READY)
    chat.types('"""\rthree\r\rlines\r"""\r')
    chat.until("the cat\r\n")
    chat.until(READY)
    chat.types(f"/save {tmp_path}/c.json\r")
    chat.until("wrote 8 messages")
    chat.until(READY)
    chat.types("\x04")
    assert chat.ends() == 0
    messages = json.loads((tmp_path / "c.json").read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["one", "one!", "two\nlines", "three\n\nlines"]
    assert {m["content"] for m in messages[1::2]} == {"the cat"}


def test_ctrl_c_ends_the_reply_and_not_the_program(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal(_endless(tmp_path), "--ctx", 1 << 16)
    chat.until(READY)
    chat.types("go\r")
    chat.until("xyxyxy")
    chat.interrupt_until("[interrupted]")
    chat.until(READY)
    chat.types("a line that is given up")
    chat.until("a line that is given up")
    chat.interrupt_until(READY)
    chat.types("/stats\r")
    assert "ended by interrupted" in chat.until(READY)
    chat.types("/quit\r")
    assert chat.ends() == 0


def test_thinking_is_dimmed_and_nothing_steers_the_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    model = _saying(tmp_path, "\x1b[2J<think>\u202e")
    chat = terminal(model)
    chat.until(READY)
    chat.types("go\r")
    reply = chat.until(READY)
    assert "\\x1b[2J\x1b[2m<think>\\u{202e}\x1b[0m\r\n" in reply


def test_errors_are_shown_and_the_conversation_goes_on(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    chat = terminal(_saying(tmp_path, "the cat"), "--ctx", 40)
    chat.until(READY)
    for line, message in (
        ("/nonsense", "there is no command /nonsense; /help shows them"),
        ("/save", "/save needs the name of a file"),
        (f"/save {tmp_path}/there", "exists already; give another name, or start the chat with --force"),
        ("q" * 50, "the context 40 positions; /reset starts anew"),
        ("/help", "set the system message"),
        ("/system Be kind.", "[system message set]"),
        ("/reset", "[the conversation is forgotten]"),
        ("/usr is a folder? ok", "there is no command /usr"),
        ("/usr/bin", "the cat"),
    ):
        chat.types(line + "\r")
        chat.until(message)
        chat.until(READY)
    assert (tmp_path / "there").read_text() == "x"


# ---------------------------------------------------------------------------------------------------------------------
# Without a terminal


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: object) -> tuple[int, str, str]:
        code = invoke(["run", *map(str, args), "--engine", "reference"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_from_a_pipe_replies_are_plain_and_errors_end_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _saying(tmp_path, "\x1b[2J<think>c")
    text = f'one\n\n"""\ntwo\nlines\n"""\n/save {tmp_path}/c.json\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code, out, err = run(model, "--chat", "--stats")
    assert (code, out) == (0, "\x1b[2J<think>c\n" * 2)
    assert "tokens were in the cache" in err
    assert json.loads((tmp_path / "c.json").read_text())["messages"][2]["content"] == "two\nlines"
    monkeypatch.setattr(sys, "stdin", io.StringIO('"""\nnot ended\n'))
    assert run(model, "--chat") == (1, "", 'mlb: error: the message that """ begins has no """ at its end\n')


@pytest.mark.parametrize("name", ["m.mlb", "m.json", "m.tokenizer.json"])
def test_a_conversation_is_never_saved_over_the_models_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = _saying(tmp_path, "the cat")
    before = (tmp_path / name).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/save {tmp_path / name}\n"))
    code, out, err = run(model, "--chat", "--force")
    assert (code, out) == (1, "")
    assert "it is the input itself; give another name" in err
    assert (tmp_path / name).read_bytes() == before


# ---------------------------------------------------------------------------------------------------------------------
# One turn, and wrong usage


def test_stop_texts(run: Run, tmp_path: Path) -> None:
    model = _saying(tmp_path, "the cat")
    assert run(model, "-p", "a", "--stop", "zz", "--stop", "e c")[:2] == (0, "th\n")
    document = json.loads(run(model, "-p", "a", "--stop", " cat", "--json")[1])
    assert (document["text"], document["stop_reason"], document["stop_text"]) == ("the", "stop", " cat")
    # No tokenizer, no text to look for the stop in.
    (tmp_path / "m.tokenizer.json").unlink()
    assert "no tokenizer: tried" in run(model, "--prompt-ids", "2", "--stop", "x")[2]


def test_system_and_template_for_one_turn(run: Run, tmp_path: Path) -> None:
    model = write_runnable(tmp_path)
    n_tokens = json.loads(run(model, "-p", "a", "-n", 0, "--json")[1])["prompt_tokens"]
    with_system = json.loads(run(model, "-p", "a", "--system", "bc", "-n", 0, "--json")[1])["prompt_tokens"]
    assert with_system == n_tokens + 4  # <|user|> b c <|end|>
    (tmp_path / "t.jinja").write_text("<|user|>{{ messages[-1].content }}")
    template = ["--template", tmp_path / "t.jinja"]
    assert json.loads(run(model, "-p", "a", *template, "-n", 0, "--json")[1])["prompt_tokens"] == 2
    assert "no place for a system message" in run(model, "-p", "a", *template, "--system", "b")[2]
    assert json.loads(run(model, "-p", "a", "--template", "chatml", "-n", 0, "--json")[1])["prompt_tokens"] > 20
    assert "no file, and the built-in templates are chatml" in run(model, "-p", "a", "--template", "nonsense")[2]


def test_no_think(run: Run, tmp_path: Path) -> None:
    model = write_runnable(tmp_path)
    assert "no switch for thinking" in run(model, "-p", "a", "--no-think")[2]
    counts = [
        json.loads(run(model, "-p", "a", "--template", "qwen3.5", "-n", 0, "--json", *option)[1])["prompt_tokens"]
        for option in ([], ["--no-think"])
    ]
    assert counts[1] == counts[0] + len(TOKENIZER.encode("\n</think>\n\n").ids)


def test_without_settings_a_template_makes_a_chat(run: Run, tmp_path: Path) -> None:
    model = _saying(tmp_path, "the cat")
    (tmp_path / "m.json").unlink()
    assert "the model has no chat template; give one with --template FILE, or chatml" in run(model, "--chat")[2]
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<|bot|>{{ m.content }}<|end|>{% endfor %}<|bot|>")
    code, out, err = run(model, "-p", "a", "--template", tmp_path / "t.jinja", "-n", 30)
    assert (code, out, err) == (0, "the cat\n", "")  # the template's <|end|> ends it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chat", "-p", "a"], "give one of -p TEXT"),
        (["--chat", "--json"], "--chat goes without"),
        (["--chat", "--raw"], "--chat goes without"),
        (["-p", "a", "--raw", "--system", "b"], "are for --chat, and for -p without --raw"),
        (["--prompt-ids", "1", "--template", "chatml"], "are for --chat"),
        (["-p", "a", "--stop", ""], "--stop needs a text"),
    ],
)
def test_wrong_usage(run: Run, tmp_path: Path, options: list[str], message: str) -> None:
    code, out, err = run(write_runnable(tmp_path), *options)
    assert (code, out) == (2, "")
    assert message in err
