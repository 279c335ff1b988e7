"""``mlb pack-embed`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.embed.registry import add_license
from krafla_cli.formats import lemb
from tests.embed.students import VOCAB, bert_tokenizer, write_student


@pytest.fixture
def student(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_student(tmp_path / "student")


def pack(*args: object) -> int:
    return run(["pack-embed", *map(str, args)])


def test_pack(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack(student, "-o", "m.bin") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("m.bin: student 1.0.0, transformer, 3.54 KB\nembedding table: relative error 0.0")
    assert lemb.validate("m.bin").valid
    assert run(["validate", "m.bin"]) == 0
    assert run(["inspect", "m.bin", "--tensors"]) == 0
    assert "2 layers, ternary weights, int4 embedding table" in capsys.readouterr().out


def test_json_is_one_document(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (student / "meta.json").write_text('{"teacher": "t"}')
    assert (
        pack(student, "-o", "m.bin", "--json", "--metadata", student / "meta.json", "--embedding-quant", "ternary") == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == "m.bin"
    assert told["header"]["embedding_quant"] == "ternary"
    assert told["metadata"] == {"teacher": "t"}
    assert told["sha256"] == Path("m.bin").read_bytes()[-32:].hex()
    error = told["embedding_error"]
    assert error["relative"] < error["relative_with_half_mean_threshold"]


def test_all_options(student: Path) -> None:
    options = "--embedding-quant int8 --weight-quant fp32 --matryoshka 2,6 --max-seq-len 9 --lower-case --keep-accents"
    more = "--license-id 5 --model-id mini --model-version 2.3.4"
    assert pack(student, "-o", "m.bin", *options.split(), *more.split()) == 0
    header = lemb.read("m.bin").header
    assert (header.embedding_encoding, header.weight_encoding) == ("int8", "fp32")
    assert (header.dims, header.max_seq_len, header.lower_case, header.strip_accents) == ((2, 6, 12), 9, True, False)
    assert (header.license_id, header.name, header.version) == (5, "mini", "2.3.4")
    assert not header.has_fingerprint


def test_overrides_and_the_turkish_caveat_are_said(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack(student, "-o", "m.bin", "--lower-case") == 0
    err = capsys.readouterr().err
    assert "warning: lower-casing is off in the student's tokenizer, the option turns it on" in err
    assert "do_lower_case must be off for Turkish models" in err
    assert pack(student, "-o", "m.bin", "--force", "--cased", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_nothing_is_overwritten(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack(student, "-o", "m.bin") == 0
    before = Path("m.bin").read_bytes()
    assert pack(student, "-o", "m.bin", "--embedding-quant", "fp32") == 1
    assert "m.bin exists already; --force overwrites it" in capsys.readouterr().err
    assert Path("m.bin").read_bytes() == before
    assert pack(student, "-o", "m.bin", "--embedding-quant", "fp32", "--force") == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "keys.jsonl", "meta.json"])
def test_never_an_input(student: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_license(student / "keys.jsonl", 5, "c")
    (student / "meta.json").write_text("{}")
    before = (student / name).read_bytes()
    options = ("--registry", student / "keys.jsonl", "--license-id", 5, "--metadata", student / "meta.json")
    assert pack(student, "-o", student / name, "--force", *options) == 1
    assert "it is the input itself" in capsys.readouterr().err
    assert (student / name).read_bytes() == before


def test_fingerprints_from_registry_and_key_file(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    added = add_license(Path("keys.jsonl"), 7, "c")
    Path("key").write_text(added.key.hex() + "\n")
    Path("key").chmod(0o600)
    assert pack(student, "-o", "a.bin", "--license-id", 7, "--registry", "keys.jsonl", "-v") == 0
    assert pack(student, "-o", "b.bin", "--license-id", 7, "--fingerprint-key", "key", "--json") == 0
    captured = capsys.readouterr()
    assert Path("a.bin").read_bytes() == Path("b.bin").read_bytes()
    assert "fingerprint of license 7" in captured.err
    assert added.key.hex() not in captured.out + captured.err
    assert lemb.read("a.bin").header.has_fingerprint
    assert pack(student, "-o", "c.bin", "--license-id", 7) == 0
    assert "the license id is written without a fingerprint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--registry", "keys.jsonl"], 2, "a fingerprint needs --license-id"),
        (["--fingerprint-key", "key"], 2, "a fingerprint needs --license-id"),
        (["--registry", "k", "--fingerprint-key", "key", "--license-id", "1"], 2, "not both"),
        (["--registry", "none.jsonl", "--license-id", "1"], 1, "cannot open none.jsonl"),
        (["--fingerprint-key", "none", "--license-id", "1"], 1, "cannot open none"),
        (["--license-id", "0"], 2, "0 is not in the range"),
        (["--matryoshka", "8,4"], 1, "--matryoshka must ascend"),
        (["--matryoshka", "4,x"], 2, "must be widths such as 64,128,256"),
        (["--model-version", "1.2"], 2, "must be MAJOR.MINOR.PATCH"),
        (["--model-version", "256.0.0"], 2, "at most 255.255.65535"),
        (["--embedding-quant", "int2"], 2, "int2"),
        (["--metadata", "none.json"], 1, "cannot open none.json"),
        (["--metadata", "student"], 1, "student"),
        (["--max-seq-len", "0"], 2, "0 is not in the range"),
    ],
)
def test_wrong_options(
    student: Path, args: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack(student, "-o", "m.bin", *args) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert not Path("m.bin").exists()


def test_metadata_is_json_for_other_programs(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("meta.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert pack(student, "-o", "m.bin", "--metadata", "meta.json") == 0
    assert lemb.read("m.bin").metadata == b'{"a": 1}'
    for value in ("NaN", "-Infinity"):
        Path("meta.json").write_text(f'{{"eval": {{"stsb": {value}}}}}')
        assert pack(student, "-o", "m.bin", "--force", "--metadata", "meta.json") == 1
        assert f"meta.json: not usable JSON: {value} is no JSON number" in capsys.readouterr().err


def test_failures_leave_nothing(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bert_tokenizer((*VOCAB[:-1], "ü" * 128)).save(str(student / "tokenizer.json"))
    assert pack(student, "-o", "m.bin") == 1
    assert "has 256 bytes, the format holds 255" in capsys.readouterr().err
    assert pack(student, "-o", "none/m.bin") == 1
    assert "the folder none does not exist" in capsys.readouterr().err
    assert [p.name for p in Path().iterdir()] == ["student"]
