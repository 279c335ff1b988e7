"""The command line as a whole: one line for a failure, exit codes, help that suggests."""

from __future__ import annotations

import subprocess
import sys

import pytest

from krafla_cli.cli import COMMANDS
from krafla_cli.cli import invoke as run


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_opens_with_a_sentence_and_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"mlb {name} ") >= 3  # the usage line and two examples


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mlb 0.")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["inspct", "x"], "No such command 'inspct'. Did you mean 'inspect'?"),
        (["inspect", "x", "--tensor"], "--tensors"),
        (["convert", "x", "--wtype", "q5"], "'q5' is not one of 'q8', 'q4'"),
        (["inspect"], "Missing argument 'FILE'"),
        (["validate", "x", "y", "--ctx", "3"], "No such option"),
    ],
)
def test_wrong_usage(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("mlb: error: ")
    assert error.count("\n") == 1
    assert text in error


def test_a_failure_is_one_line_and_debug_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "/nonexistent/x.mlb"]) == 1
    assert capsys.readouterr().err == "mlb: error: cannot open /nonexistent/x.mlb: No such file or directory\n"
    code = "from krafla_cli.cli import main; main(['inspect', '/nonexistent/x.mlb', '--debug'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_a_closed_pipe_is_quiet() -> None:
    code = "import sys; from krafla_cli.cli import main; main(['--help'])"
    script = f'{sys.executable} -c "{code}" | true'
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("args", [["validate", ""], ["convert", ""], ["run", "", "-p", "x"], ["inspect", ""]])
def test_an_empty_path_is_not_the_current_folder(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2
    assert "an empty path" in capsys.readouterr().err
