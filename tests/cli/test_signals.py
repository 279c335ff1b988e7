"""SIGINT and SIGTERM end a command at once, wherever they find it: no traceback, nothing left behind, 130 and 143."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from krafla_cli.convert.pipeline import Options, convert
from krafla_cli.formats.atomic import _locked
from tests.helpers.llama import CONFIG, tensors, write
from tests.helpers.models import random_model

ROOT = Path(__file__).parents[2]
# Sends the process a signal when a module is looked for the first time, inside of its importer's importing.
IMPORTING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
name, signum = sys.argv[1], int(sys.argv[2])
class Finder:
    def find_spec(self, wanted, path=None, target=None):
        if wanted == name:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signum)
sys.meta_path.insert(0, Finder())
from krafla_cli.__main__ import main
sys.argv = ["mlb", *sys.argv[3:]]
main()
"""


def ended(code: str, *args: object) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.stdout == ""
    return result.returncode, result.stderr.lstrip("\n")  # click ends the line of the terminal's ^C


@pytest.mark.parametrize(
    "module", ["click", "krafla_cli.convert.plan", "numpy", "numpy.lib", "krafla_cli.quant.blocks"]
)
def test_while_importing(tmp_path: Path, module: str) -> None:
    source = write(tmp_path / "hf")
    args = ("convert", source, "-o", tmp_path / "m.mlb")
    assert ended(IMPORTING, module, int(signal.SIGINT), *args) == (130, "mlb: error: interrupted\n")
    assert ended(IMPORTING, module, int(signal.SIGTERM), *args) == (143, "")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    "wrapped",
    [
        "try: raise KeyboardInterrupt\nexcept KeyboardInterrupt as e: raise RuntimeError('set_name') from e",
        "class A:\n  def __del__(self): os.kill(os.getpid(), signal.SIGINT); [0 for _ in range(999)]\na = A(); del a",
    ],
)
def test_inside_of_what_hides_exceptions(wrapped: str) -> None:
    """A library that makes an error of its own of it while it is imported, and a callback that Python mutes."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from krafla_cli import cli, __main__\n"
        f"def run(): exec({wrapped!r}, globals()); [os.sched_yield() for _ in range(9999)]\n"
        "cli.main = run\n"
        "__main__.main()\n"
    )
    assert ended(code) == (130, "mlb: error: interrupted\n")


TWO = """
import sys
from pathlib import Path
from krafla_cli.convert.pipeline import Options, convert
for _ in range(int(sys.argv[4])):
    convert(Path(sys.argv[1]), Path(sys.argv[2]), options=Options(wtype=sys.argv[3]), force=True)
"""


def test_two_conversions_to_one_target(tmp_path: Path) -> None:
    """Whoever looks under the folder's lock finds the model and the settings of one and the same run."""
    sources = []
    for seed in (1, 2):
        weights = tensors(CONFIG, seed)
        sources.append(write(tmp_path / f"hf{seed}", CONFIG | {"eos_token_id": seed}, weights))
    out = tmp_path / "m.mlb"
    expected = {}
    for seed, source in enumerate(sources, 1):
        result = convert(source, tmp_path / f"alone{seed}.mlb", options=Options(wtype="q8"))
        expected[result.sha256] = seed
    started = [subprocess.Popen([sys.executable, "-c", TWO, str(s), str(out), "q8", "12"], cwd=ROOT) for s in sources]
    n_looks = 0
    while any(p.poll() is None for p in started):
        if out.exists():
            with _locked(tmp_path):
                check_pair(out, expected)
                n_looks += 1
        os.sched_yield()
    assert [p.wait() for p in started] == [0, 0]
    assert n_looks
    check_pair(out, expected)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(("m.", ".mlb"))) == ["m.json", "m.mlb"]


def check_pair(model: Path, expected: dict[str | None, int]) -> None:
    import hashlib

    document = json.loads(model.with_suffix(".json").read_text())
    assert document["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert document["stop_ids"] == [expected[document["sha256"]]]


def test_two_conversions_without_force(tmp_path: Path) -> None:
    source = write(tmp_path / "hf")
    command = [sys.executable, "-m", "krafla_cli", "convert", str(source), "-o", str(tmp_path / "m.mlb")]
    started = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [p.communicate()[1] for p in started]
    assert sorted(p.returncode for p in started) == [0, 1]
    assert "exists already; --force overwrites it" in "".join(errors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.json", "m.mlb"]


# Cuts the file short when it has been mapped, then goes on with the command.
SHRINKING = """
import os, sys
import krafla_cli.formats.cursor as cursor
mapped = cursor.map_file
def map_file(path):
    view = mapped(path)
    if str(path).endswith(".mlb"):
        os.truncate(path, 4096)
    return view
cursor.map_file = map_file
from krafla_cli.__main__ import main
sys.argv = ["mlb", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("command", [["validate"], ["run", "--prompt-ids", "1,2,3", "-n", "2", "--threads", "2"]])
def test_a_file_that_is_cut_short_in_use(tmp_path: Path, command: list[str]) -> None:
    random_model(tmp_path / "m.mlb")
    assert (tmp_path / "m.mlb").stat().st_size > 3 * 4096
    name, *options = command
    code, said = ended(SHRINKING, name, tmp_path / "m.mlb", *options)
    assert code == 1
    assert said.splitlines()[-1] == (
        "mlb: error: a file was cut short while it was in use (SIGBUS); replace files by renaming, and run this again"
    )


def test_a_closed_standard_output(tmp_path: Path) -> None:
    """Nothing is written into a file that happens to take its place, and the loss is told."""
    random_model(tmp_path / "m.mlb")
    command = f"{sys.executable} -m krafla_cli inspect {tmp_path / 'm.mlb'} >&-"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr == "mlb: error: standard output is closed; send it to /dev/null instead\n"
