"""`mlb tokenizer`: converting, and looking at tokens."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from krafla_cli import cli
from krafla_cli.formats import mlt
from tests.tokenizer import toys


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    document = toys.byte_level(toys.sequence(toys.DIGITS, toys.GPT2_BYTE_LEVEL), vocab_size=400)
    return toys.write(tmp_path_factory.mktemp("Toy-1B"), document, {"eos_token": "<|im_end|>"})


@pytest.fixture(scope="module")
def converted(folder: Path) -> Path:
    assert cli.invoke(["tokenizer", str(folder), "-o", str(folder / "t.mlt"), "--quiet"]) == 0
    return folder / "t.mlt"


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.invoke(["tokenizer", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_converts_and_says_what_was_proven(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, folder)
    name = f"{folder.name}.mlt"
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0] == f"{name}: byte-level BPE, flags 96 (gpt2_regex, split_digits)"
    assert lines[1].startswith("  403 tokens (3 added), ")
    assert lines[2] == "  BOS -1, EOS 402"
    assert lines[3].startswith("  proven: the same ids as the tokenizers library gives, on ")
    assert mlt.validate(tmp_path / name).valid
    code, _, err = run(capsys, folder)
    assert (code, err) == (1, f"mlb: error: {name} exists already; --force overwrites it\n")
    assert run(capsys, folder / "tokenizer.json", "--force", "-o", name)[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]


def test_json(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, folder, "-o", tmp_path / "t.mlt", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["proven_lines"] > 2000
    assert {k: report[k] for k in ("kind", "flags", "flag_names", "n_vocab", "n_added", "n_holes", "bos", "eos")} == {
        "kind": "byte-level BPE",
        "flags": 96,
        "flag_names": ["gpt2_regex", "split_digits"],
        "n_vocab": 403,
        "n_added": 3,
        "n_holes": 0,
        "bos": -1,
        "eos": 402,
    }
    assert report["bytes"] == (tmp_path / "t.mlt").stat().st_size


def test_a_refusal_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = toys.write(tmp_path / "src", toys.sentencepiece(dict(toys.SPACES), vocab_size=400))
    code, out, err = run(capsys, source, "-o", tmp_path / "t.mlt")
    assert (code, out) == (1, "")
    assert "tokenizer.json: normalizer: puts no ▁ before the text" in err
    assert err.startswith("mlb: error: ")
    assert err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("kind", ["json", "mlt"])
def test_encode_and_decode(folder: Path, converted: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    source = converted if kind == "mlt" else folder
    code, out, _ = run(capsys, source, "--encode", "hi<|im_end|>é\x1b\U0001f9a6", "--json")
    document: dict[str, Any] = json.loads(out)
    assert code == 0
    assert b"".join(bytes.fromhex(t["bytes"]) for t in document["tokens"]) == "hi<|im_end|>é\x1b\U0001f9a6".encode()
    assert [t["kind"] for t in document["tokens"]].count("added") == 1
    ids = ",".join(map(str, document["ids"]))
    assert run(capsys, source, "--decode", ids)[:2] == (0, "hi<|im_end|>é\x1b\U0001f9a6\n")
    assert json.loads(run(capsys, source, "--decode", f"[{ids}]", "--json")[1])["text"] == "hi<|im_end|>é\x1b\U0001f9a6"
    code, out, err = run(capsys, source, "--encode", "a\x1b\xa0")
    assert (code, err) == (0, f"{out.count(chr(10))} tokens\n")
    assert "\x1b" not in out
    assert "piece    '\\x1b'" in out


def test_encode_reads_stdin(
    converted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a b\n")))
    rows = json.loads(run(capsys, converted, "--encode", "-", "--json")[1])["tokens"]
    assert [row["text"] for row in rows] == ["a", " b", "\n"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb")))
    code, _, err = run(capsys, converted, "--encode", "-")
    assert (code, err) == (1, "mlb: error: the text is not valid UTF-8: invalid start byte at 1\n")


def test_bos_of_encode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = toys.write(tmp_path, toys.sentencepiece(toys.normalizers(toys.PREPEND, toys.SPACES), vocab_size=400))
    with_bos = json.loads(run(capsys, source, "--encode", "a", "--json")[1])["ids"]
    assert with_bos[0] == 1
    assert json.loads(run(capsys, source, "--encode", "a", "--no-bos", "--json")[1])["ids"] == with_bos[1:]


@pytest.mark.parametrize("kind", ["json", "mlt"])
def test_dump(folder: Path, converted: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    source = converted if kind == "mlt" else folder
    code, out, _ = run(capsys, source, "--dump")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 403)
    assert lines[402] == "     402  added    '<|im_end|>'"
    assert "\x1b" not in out
    rows = json.loads(run(capsys, source, "--dump", "--json")[1])["tokens"]
    assert [r["id"] for r in rows] == list(range(403))
    assert {r["kind"] for r in rows} == {"added", "byte", "piece"}


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--encode", "a", "--decode", "1"], 2, "exclude each other"),
        (["--dump", "-o", "x"], 2, "exclude each other"),
        (["--no-bos"], 2, "--no-bos goes with --encode"),
        (["--decode", "1,x"], 2, '--decode: "x" is no token id; write them as 1,5,7'),
        (["--decode", "403"], 1, "403 is no token id; the vocabulary has 403 of them"),
        (["--decode", "-1"], 2, '"-1" is no token id'),
        (["--decode", "99999999999999999999"], 2, '"99999999999999999999" is no token id'),
        (["--encode", "a\udcff"], 1, "the text is not valid UTF-8: surrogates not allowed at 1"),
    ],
)
def test_wrong_use(
    converted: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    got, out, err = run(capsys, converted, *args)
    assert (got, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


def test_sources_that_are_none(tmp_path: Path, converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.mlt").write_bytes(b"MLT1" + bytes(60))
    (tmp_path / "other.bin").write_bytes(b"\x00\x01\x02")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    for args, message in (
        ([tmp_path / "none"], "cannot open"),
        ([tmp_path], "has no tokenizer.json"),
        ([converted], "is a .mlt already"),
        ([tmp_path / "bad.mlt", "--encode", "a"], "version at offset 4: must be 1, is 0"),
        ([tmp_path / "other.bin", "--encode", "a"], "the tokenizers library cannot read it"),
        ([tmp_path / "other.bin"], "other.bin"),
        ([tmp_path / "m.gguf", "--encode", "a"], "is a GGUF model; mlb convert writes its tokenizer beside the model"),
    ):
        code, out, err = run(capsys, *args)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert message in err


def test_importing_the_package_imports_neither_torch_nor_numba() -> None:
    code = "import sys, krafla_cli.tokenizer as t; t.load_tokenizer; t.encode_chat; t.convert_tokenizer\n"
    code += "print({'torch', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
