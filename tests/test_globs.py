"""Names of files that may be patterns."""

from __future__ import annotations

from pathlib import Path

import pytest

from krafla_cli.errors import InputError
from krafla_cli.globs import expand


def test_globs_are_sorted_and_each_file_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "c.md", "[x].txt"):
        Path(name).touch()
    Path("d.txt").mkdir()
    assert [str(p) for p in expand(["b.txt", "*.txt", "*.md"])] == ["b.txt", "[x].txt", "a.txt", "c.md"]
    assert expand(["[x].txt"]) == [Path("[x].txt")]  # a file of that name before a pattern
    assert expand(["none.txt"]) == [Path("none.txt")]  # told when it is opened
    with pytest.raises(InputError, match=r"no file matches '\*\.jsonl'"):
        expand(["*.jsonl"])
