"""Input that makes no sense: each is refused, or remarked on, in words that a person can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krafla_cli.cli import invoke as run
from krafla_cli.formats import mli, mlt
from tests.convert.test_importance import DIMENSIONS, filled
from tests.formats.test_mlb import MINIMAL
from tests.formats.test_mlb import write as mlb_bytes
from tests.helpers.llama import CONFIG, write
from tests.helpers.runnable import write_runnable


def told(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    code = run([str(a) for a in args])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 1e30}, "rms_norm_eps must be 0 to 1, is 1e+30"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a finite number, is null"),
        ({"rms_norm_eps": [1e-6]}, "rms_norm_eps must be a finite number, is [1e-06]"),
        ({"tie_word_embeddings": "true"}, 'tie_word_embeddings must be true or false, is "true"'),
        ({"hidden_size": None}, "hidden_size must be a whole number of at least 1, is null"),
        ({"hidden_size": {"a": 1}}, "hidden_size must be a whole number of at least 1, is an object"),
        ({"hidden_act": None}, "hidden_act: null is not supported; supported: "),
    ],
)
def test_config(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str) -> None:
    source = write(tmp_path / "hf", CONFIG)
    (source / "config.json").write_text(json.dumps(CONFIG | changes))
    code, err = told(capsys, "convert", source, "-o", tmp_path / "m.mlb")
    if changes.get("rms_norm_eps", 1) is None or changes.get("hidden_size", 1) is None:
        assert "is missing" in err
    else:
        assert message in err
    assert code == 1
    assert len(err.splitlines()) == 1


def test_what_has_no_effect_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "hf", CONFIG | {"eos_token_id": [2, 40, 99]})
    mli.write(filled(DIMENSIONS), tmp_path / "i.mli")
    args = ("convert", source, "-o", tmp_path / "m.mlb", "--imatrix", tmp_path / "i.mli", "--wtype", "q8")
    code, err = told(capsys, *args)
    assert code == 0
    assert "warning: eos_token_id 40 is no id of the model, which has 40; it is left out" in err
    assert "warning: --imatrix changes nothing: it weighs Q4_0 blocks, and all matrices are Q8_0" in err
    assert json.loads((tmp_path / "m.json").read_text())["stop_ids"] == [2]


def test_top_k_is_a_whole_number(tmp_path: Path) -> None:
    source = write(tmp_path / "hf")
    (source / "generation_config.json").write_text('{"do_sample": true, "top_k": 20.0, "temperature": 1}')
    assert run(["convert", str(source), "-o", str(tmp_path / "m.mlb")]) == 0
    assert '"top_k": 20,' in (tmp_path / "m.json").read_text().replace("\n", ",")


@pytest.mark.parametrize("value", ["-1", "1e999", "1" + "0" * 400])
def test_sampling_that_no_sampler_can_do(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    source = write(tmp_path / "hf")
    (source / "generation_config.json").write_text(f'{{"top_k": {value}, "top_p": 0.9}}')
    code, err = told(capsys, "convert", source, "-o", tmp_path / "m.mlb")
    assert code == 0
    assert "mlb: warning: top_k of the generation config is " in err
    assert json.loads((tmp_path / "m.json").read_text())["sampling"] == {"top_p": 0.9}


def test_a_merge_of_an_added_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A space is spelled otherwise in an added token than in a piece."""
    tokens = [mlt.Token(0, bytes([b])) for b in range(256)] + [mlt.Token(mlt.ATTR_ADDED, b" t")]
    merges = np.array([[0x20, ord("t"), 256]], np.uint32)
    tokenizer = mlt.Mlt(mlt.Kind.BYTE_LEVEL, mlt.Flag(0), -1, -1, tuple(tokens), merges)
    (tmp_path / "t.mlt").write_bytes(mlt.to_bytes(tokenizer))
    text = f"mlb: error: {tmp_path}/t.mlt: merge 0 is of added or byte tokens, which text never is\n"
    assert told(capsys, "tokenizer", tmp_path / "t.mlt", "--encode", "a") == (1, text)


def test_the_wrong_kind_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "m.mlb"
    model.write_bytes(mlb_bytes(MINIMAL))
    assert told(capsys, "convert", model) == (
        1,
        f"mlb: error: {model} is a .mlb model already; mlb export writes it in other formats\n",
    )
    code, err = told(capsys, "tokenizer", model)
    assert (code, err) == (
        1,
        f"mlb: error: {model} is a .mlb model; its tokenizer is beside it; give a tokenizer.json or a .mlt\n",
    )
    for kind, given, advice in (("run", b"GGUF", "`mlb convert`"), ("run", b"LEMB", "`mlb embed`"),
                                ("embed", b"MLB1", "`mlb run`")):  # fmt: skip
        other = tmp_path / "other"
        other.write_bytes(given + bytes(600))
        code, err = told(capsys, kind, other, *(("-p", "hi") if kind == "run" else ("hi",)))
        assert (code, advice in err, " is a " in err) == (1, True, True)
    other.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n")
    code, err = told(capsys, "run", other, "-p", "hi")
    assert (code, "is a Git LFS pointer and not the file itself; fetch it: git lfs pull" in err) == (1, True)
    bad = tmp_path / "i.mli"
    bad.write_bytes(b"MLB1" + bytes(36))
    with pytest.raises(Exception, match=r'must be "MLI1", is "MLB1"'):
        mli.read(bad)


@pytest.mark.parametrize("ids", ["1,,2", ",1", "1,", "1;2", "-1", "٣", "1.0", "0x1"])
def test_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str], ids: str) -> None:
    model = write_runnable(tmp_path)
    code, err = told(capsys, "run", model, "--prompt-ids", ids, "--engine", "reference")
    assert code == 2
    assert err.endswith('" is no token id; write them as 1,5,7\n')


def test_one_matrix_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, link, out = tmp_path / "a.mli", tmp_path / "link.mli", tmp_path / "o.mli"
    mli.write(filled(DIMENSIONS), a)
    link.symlink_to("a.mli")
    for other in (a, link):
        text = f"mlb: error: {other} is given twice, and would count twice\n"
        assert told(capsys, "imatrix", "merge", a, other, "-o", out) == (1, text)
    assert told(capsys, "imatrix", "merge", a, "-o", out) == (0, f"wrote {out}: 1 file, 7 tokens in the layers\n")


def test_settings_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_runnable(tmp_path)
    settings = model.with_suffix(".json")
    args = ("run", model, "--prompt-ids", "1", "-n", "1", "--engine", "reference")
    document = json.loads(settings.read_text())
    settings.write_text(json.dumps(document | {"sha256": "0" * 64}))
    text = f"mlb: warning: {settings} is of another model: its SHA-256 is not this file's\n"
    assert told(capsys, *args) == (0, text)
