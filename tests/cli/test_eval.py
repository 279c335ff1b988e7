"""``mlb eval`` as a user calls it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from krafla_cli import open_model
from krafla_cli.cli import invoke as run_cli
from krafla_cli.formats.mlb import WTYPE_Q4_0
from tests.helpers import llama
from tests.helpers.models import tiny
from tests.helpers.runnable import small_tokenizer, write_runnable

TEXT = "the cat sat on the mat, the rat sat on the cat; and so on, and on. " * 3


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "t.txt").write_text(TEXT)
    return tmp_path / "t.txt"


def _model(tmp_path: Path, name: str, **header: int) -> Path:
    (tmp_path / name).mkdir()
    return write_runnable(tmp_path / name, tiny(vocab=small_tokenizer().get_vocab_size(), **header))


def _eval(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = run_cli(["eval", *map(str, args), "--engine", "reference"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_perplexity(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _model(tmp_path, "a")
    code, out, _err = _eval(capsys, model, "-f", text, "--json", "--ctx", 200)
    assert code == 0
    document = json.loads(out)
    ids = small_tokenizer().encode(TEXT).ids
    logits = open_model(model, engine="reference").logits(ids)[:-1].astype(np.float64)
    nll = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(ids) - 1), ids[1:]]
    (row,) = document["models"]
    assert (document["n_windows"], row["n_tokens"]) == (1, len(ids) - 1)
    assert row["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=1e-4)
    assert document["baseline"] is None
    assert row["tokens_per_second"] > 0


def test_a_table_of_several_models_with_a_baseline(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, same = _model(tmp_path, "base"), _model(tmp_path, "same")
    q4 = _model(tmp_path, "q4", wtype=WTYPE_Q4_0)
    args = (same, q4, "-f", text, "--baseline", base, "--ctx", 32, "--stride", 16)
    code, out, _err = _eval(capsys, *args, "--json")
    assert code == 0
    document = json.loads(out)
    rows = document["models"]
    assert (rows[0]["kl"], rows[0]["top1_agreement"]) == (0, 1)
    assert rows[1]["kl"] > 0
    assert rows[1]["kl_p99"] > rows[1]["kl"] > rows[1]["kl_error"] > 0
    assert rows[0]["perplexity"] == document["baseline"]["perplexity"]
    assert rows[1]["bits_per_weight"] < rows[0]["bits_per_weight"]
    code, out, _err = _eval(capsys, *args)
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [str(same), str(q4), str(base)]
    assert lines[0].split() == "model bits/weight perplexity ± KL ± KL 99 % top-1 % tokens tok/s".split()


def test_chunks_are_those_of_llama_perplexity(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _model(tmp_path, "a")
    document = json.loads(_eval(capsys, model, "-f", text, "--windows", "chunks", "--ctx", 16, "--json")[1])
    n_chunks = len(small_tokenizer().encode(TEXT).ids) // 16
    assert document["n_windows"] == n_chunks
    assert document["models"][0]["n_tokens"] == 7 * n_chunks


def test_a_checkpoint_is_a_baseline(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**llama.CONFIG, "vocab_size": small_tokenizer().get_vocab_size()}
    weights = {name: 0.15 * w if w.ndim == 2 else w for name, w in llama.tensors(config).items()}
    folder = llama.write(tmp_path / "hf", config, weights)
    small_tokenizer().save(str(folder / "tokenizer.json"))
    assert run_cli(["convert", str(folder), "-o", str(tmp_path / "c.mlb"), "--wtype", "q8", "--quiet"]) == 0
    capsys.readouterr()
    args = (tmp_path / "c.mlb", "-f", text, "--ctx", 64)
    document = json.loads(_eval(capsys, *args, "--baseline", folder, "--json")[1])
    (row,) = document["models"]
    assert 0 < row["kl"] < 1e-3
    assert row["perplexity"] == pytest.approx(document["baseline"]["perplexity"], rel=0.02)


def test_wrong_usage(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = _model(tmp_path, "a"), _model(tmp_path, "b")
    assert _eval(capsys, model)[0] == 2
    code, _out, err = _eval(capsys, model, "-f", text, "--windows", "chunks", "--stride", 4)
    assert (code, "--stride is for --windows sliding" in err) == (2, True)
    code, _out, err = _eval(capsys, model, other, "-f", text, "--ctx", 16, "--stride", 17)
    assert (code, err) == (1, "mlb: error: a stride of 17 with windows of 16 positions: must be 1 to 16\n")
    code, _out, err = _eval(capsys, model, "-f", tmp_path / "*.none")
    assert (code, "no file matches" in err) == (1, True)
    code, _out, err = _eval(capsys, model, "-f", tmp_path / "none.txt")
    assert (code, "cannot read" in err) == (1, True)
    (tmp_path / "empty.txt").write_text("")
    code, _out, err = _eval(capsys, model, "-f", tmp_path / "empty.txt")
    assert err == "mlb: error: the text has 0 tokens, these windows need at least 2\n"
