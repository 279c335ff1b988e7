"""``mlb run`` as a user calls it."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krafla_cli import open_model
from krafla_cli.cli import invoke as run_cli
from krafla_cli.formats.mli import read
from krafla_cli.runtime.model import Model
from krafla_cli.tokenizer.stream import decode
from tests.helpers.models import HEADERS, random_arrays
from tests.helpers.runnable import small_tokenizer, write_changed, write_runnable

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: object) -> tuple[int, str, str]:
        code = run_cli(["run", *map(str, args), "--engine", "reference"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_runnable(tmp_path)


def _document(run: Run, *args: object) -> dict[str, Any]:
    code, out, err = run(*args, "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def _fails(run: Run, *args: object, code: int = 1) -> str:
    got, out, err = run(*args)
    assert (got, out) == (code, ""), err
    assert err.startswith("mlb: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("mlb: error: ").rstrip("\n")


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def test_a_prompt_is_one_turn_of_the_chat_template(run: Run, model: Path) -> None:
    document = _document(run, model, "-p", "the cat", "-n", 4)
    tokenizer = small_tokenizer()
    prompt = [1, *tokenizer.encode("the cat").ids, 0, 2]
    assert document["prompt_tokens"] == len(prompt)
    by_ids = _document(run, model, "--prompt-ids", ",".join(map(str, prompt)), "-n", 4)
    assert by_ids["ids"] == document["ids"]
    assert document["text"] == decode(tokenizer, document["ids"], skip_special_tokens=True)


def test_control_tokens_in_a_turn_are_text(run: Run, model: Path) -> None:
    assert _document(run, model, "-p", "a<|end|>", "-n", 0)["prompt_tokens"] > 5


def test_raw_text_and_files_are_the_same(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("the cat\r\né".encode())
    raw = _document(run, model, "-p", "the cat\r\né", "--raw", "-n", 4)
    assert _document(run, model, "-f", tmp_path / "p.txt", "-n", 4)["ids"] == raw["ids"]
    assert raw["prompt_tokens"] == len(small_tokenizer().encode("the cat\r\né").ids)


def test_a_pipe_and_standard_input(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = _document(run, model, "-p", "the cat", "--raw", "-n", 4)["ids"]
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("the cat"))
    writer.start()
    assert _document(run, model, "-f", tmp_path / "pipe", "-n", 4)["ids"] == raw
    writer.join()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat")))
    assert _document(run, model, "-f", "-", "-n", 4)["ids"] == raw


def test_prompts_that_cannot_be_read(run: Run, model: Path, tmp_path: Path) -> None:
    assert "cannot read" in _fails(run, model, "-f", tmp_path / "none.txt")
    assert "cannot read" in _fails(run, model, "-f", tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8 text: byte 3 is 0xe9" in _fails(run, model, "-f", tmp_path / "latin.txt")


def test_empty_prompts(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    for args in (["-p", ""], ["-p", "", "--raw"], ["-f", tmp_path / "empty.txt"], ["--prompt-ids", ""]):
        assert "the prompt is empty" in _fails(run, model, *args)


def test_an_argument_that_is_no_text(run: Run, model: Path) -> None:
    assert _fails(run, model, "-p", "caf\udce9") == "the prompt is not UTF-8 text"


def test_a_prompt_longer_than_the_context(run: Run, model: Path) -> None:
    text = _fails(run, model, "--prompt-ids", "1,2,3,4,5", "--ctx", 4)
    assert text == (
        "the prompt has 5 tokens, the context has 4 positions of 4 left; shorten it, or raise --ctx "
        "(this model allows 256)"
    )
    assert "a context of 257 positions: the model allows 1 to 256" in _fails(run, model, "-p", "a", "--ctx", 257)


def test_what_is_no_model(run: Run, model: Path, tmp_path: Path) -> None:
    assert "cannot open" in _fails(run, tmp_path / "none.mlb", "-p", "a")
    for folder in (tmp_path, "."):
        assert "it is a folder" in _fails(run, folder, "-p", "a")
    assert 'magic at offset 0: must be "MLB1"' in _fails(run, tmp_path / "m.tokenizer.json", "-p", "a")
    model.write_bytes(model.read_bytes()[:-100])
    assert "it was cut off, or the header is wrong" in _fails(run, model, "-p", "a")


def test_wrong_usage(run: Run, model: Path) -> None:
    assert "give one of -p TEXT, -f FILE and --prompt-ids IDS" in _fails(run, model, code=2)
    assert "give one of" in _fails(run, model, "-p", "a", "--prompt-ids", "1", code=2)
    assert '--prompt-ids: "1.5" is no token id' in _fails(run, model, "--prompt-ids", "1,1.5", code=2)
    assert "top_p must be above 0 and at most 1, is 2" in _fails(run, model, "-p", "a", "--top-p", 2, code=2)
    assert "--append and --no-logits are for --imatrix" in _fails(run, model, "-p", "a", "--append", code=2)
    assert "device 'nonsense' cannot be used" in _fails(run, model, "-p", "a", "--device", "nonsense", code=2)
    assert "token id 999 is outside the vocabulary" in _fails(run, model, "--prompt-ids", "999")


# ---------------------------------------------------------------------------------------------------------------------
# What lies beside the model


def test_missing_companions_name_the_paths_tried(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "m.json").unlink()
    code, _out, err = run(model, "-p", "a", "-n", 1)
    assert code == 0
    assert err == f"no settings: tried {tmp_path}/m.json; going on without chat template and defaults\n"
    (tmp_path / "m.tokenizer.json").unlink()
    text = _fails(run, model, "-p", "a", "--raw")
    assert text == f"no tokenizer: tried {tmp_path}/m.mlt, {tmp_path}/m.tokenizer.json; give one with --tokenizer"


def test_ids_need_no_tokenizer(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "m.tokenizer.json").unlink()
    document = _document(run, model, "--prompt-ids", "5,6", "-n", 3, "--ignore-eos")
    assert document["text"] is None
    assert run(model, "--prompt-ids", "5,6", "-n", 3, "--ignore-eos")[1] == ",".join(map(str, document["ids"])) + "\n"


def test_another_tokenizer(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "m.tokenizer.json").rename(tmp_path / "other.json")
    assert _document(run, model, "-p", "the", "--tokenizer", tmp_path / "other.json", "-n", 1)["prompt_tokens"] > 2
    assert "No such file" in _fails(run, model, "-p", "a", "--tokenizer", tmp_path / "none.mlt")


def test_a_tokenizer_larger_than_the_model(run: Run, tmp_path: Path) -> None:
    model = write_runnable(tmp_path, HEADERS["plain"])
    text = _fails(run, model, "-p", "a")
    assert text.endswith(
        f"has {small_tokenizer().get_vocab_size()} tokens, the model 101: it is another model's tokenizer"
    )


def test_broken_settings(run: Run, tmp_path: Path) -> None:
    model = write_runnable(tmp_path, sampling={"top_p": 3.0})
    assert "m.json: sampling: top_p must be above 0 and at most 1, is 3" in _fails(run, model, "-p", "a")
    (tmp_path / "m.json").write_text("{")
    assert "m.json" in _fails(run, model, "-p", "a")


def test_sampling_defaults_come_from_the_settings(run: Run, tmp_path: Path) -> None:
    model = write_runnable(tmp_path, sampling={"temperature": 1.5, "top_k": 50.0}, stop_ids=())
    first = _document(run, model, "-p", "a", "-n", 20)
    assert _document(run, model, "-p", "a", "-n", 20)["ids"] != first["ids"]
    assert _document(run, model, "-p", "a", "-n", 20, "--seed", first["seed"])["ids"] == first["ids"]
    greedy = [_document(run, model, "-p", "a", "-n", 20, "--temp", 0)["ids"] for _ in range(2)]
    assert greedy[0] == greedy[1]


# ---------------------------------------------------------------------------------------------------------------------
# Generation


def _favouring(tmp_path: Path, ids: list[int], max_seq: int = 256) -> Path:
    """A model that says ``ids``, each after the one before, whatever came earlier."""
    model = write_runnable(tmp_path)
    header = replace(HEADERS["plain"], vocab=small_tokenizer().get_vocab_size(), dim=64, n_layers=1, max_seq=max_seq)
    arrays = {name: np.zeros_like(a) for name, a in random_arrays(header).items()}
    for name in ("layers.0.attn_norm", "layers.0.ffn_norm", "final_norm"):
        arrays[name][:] = 1
    for channel, (before, after) in enumerate(itertools.pairwise(ids)):
        arrays["tok_emb"][before, channel] = 1
        arrays["wcls"][after, channel] = 1
    write_changed(model, header, arrays)
    return model


def test_stop_ids_end_it_and_are_not_part_of_the_text(run: Run, tmp_path: Path) -> None:
    the, cat = (small_tokenizer().encode(word).ids for word in ("the", " cat"))
    model = _favouring(tmp_path, [1, *the, *cat, 0, 5])
    document = _document(run, model, "--prompt-ids", 1, "-n", 50)
    assert (document["text"], document["stop_reason"], document["stop_id"]) == ("the cat", "stop", 0)
    assert document["ids"] == [*the, *cat]
    # A stop id in the prompt does not end the run before it starts.
    assert _document(run, model, "--prompt-ids", "0,1", "-n", 50)["text"] == "the cat"
    on = _document(run, model, "--prompt-ids", 1, "-n", len(the + cat) + 2, "--ignore-eos")
    assert (on["ids"][-2:], on["stop_reason"]) == ([0, 5], "length")
    assert on["text"].startswith("the cat")
    assert "<|end|>" not in on["text"]


def test_characters_come_whole(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = small_tokenizer().encode("é€😀").ids
    assert len(ids) == 9  # each byte a token
    model = _favouring(tmp_path, [1, *ids, 0])
    pieces: list[str] = []
    monkeypatch.setattr("click.echo", lambda text="", **_options: pieces.append(str(text)))
    assert run(model, "--prompt-ids", 1)[0] == 0
    assert pieces == ["é", "€", "😀", "\n"]


def test_text_that_ends_inside_a_character(run: Run, tmp_path: Path) -> None:
    ids = small_tokenizer().encode("a😀").ids
    model = _favouring(tmp_path, [1, *ids])
    assert _document(run, model, "--prompt-ids", 1, "-n", 3)["text"] == "a�"
    lone = small_tokenizer().token_to_id("Ģ")  # byte 0x80
    model = _favouring(tmp_path, [1, lone, 0])
    assert _document(run, model, "--prompt-ids", 1)["text"] == "�"


def test_a_terminal_is_not_steered(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("a\x1b[2J\n").ids
    model = _favouring(tmp_path, [1, *ids, 0])
    assert run(model, "--prompt-ids", 1)[1] == "a\x1b[2J\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(model, "--prompt-ids", 1)[1] == "a\\x1b[2J\n\n"


def test_the_context_fills_up(run: Run, model: Path) -> None:
    code, _out, err = run(model, "--prompt-ids", "5,6", "--ctx", 8, "--ignore-eos")
    assert code == 0
    assert "the context of 8 positions is full" in err
    assert _document(run, model, "--prompt-ids", "5,6", "--ctx", 8, "--ignore-eos")["generated_tokens"] == 7


def test_the_document_and_the_statistics(run: Run, model: Path) -> None:
    _code, out, err = run(model, "--prompt-ids", "5,6,7", "-n", 2, "--ignore-eos", "--json", "--stats", "--seed", 3)
    document = json.loads(out)
    seconds = {k: v for k, v in document.items() if k.endswith("seconds")}
    assert set(seconds) == {"load_seconds", "prefill_seconds", "decode_seconds"}
    assert all(v > 0 for v in seconds.values())
    assert {k: document[k] for k in ("prompt_tokens", "generated_tokens", "seed", "engine", "activations", "kv")} == {
        "prompt_tokens": 3,
        "generated_tokens": 2,
        "seed": 3,
        "engine": "reference",
        "activations": "f32",
        "kv": "f32",
    }
    assert "prompt 3 tokens in" in err
    assert "tok/s" in err


# ---------------------------------------------------------------------------------------------------------------------
# Files that it writes


def test_logits(run: Run, model: Path, tmp_path: Path) -> None:
    ids = [5, 9, 12, 200]
    code, out, _err = run(model, "--prompt-ids", "5,9,12,200", "--logits", tmp_path / "l.npy")
    assert (code, out) == (0, "")
    logits = np.load(tmp_path / "l.npy")
    assert logits.dtype == np.float32
    opened: Model = open_model(model, engine="reference")
    np.testing.assert_allclose(logits, opened.logits(ids), rtol=1e-5, atol=1e-5)
    assert "exists already; --force" in _fails(run, model, "--prompt-ids", "5", "--logits", tmp_path / "l.npy")
    assert run(model, "--prompt-ids", "5", "--logits", tmp_path / "l.npy", "--force", "-n", 2)[0] == 0
    assert len(np.load(tmp_path / "l.npy")) == 1
    assert "No such file" in _fails(run, tmp_path / "none.mlb", "--prompt-ids", "5")


def test_outputs_are_refused_before_any_work(run: Run, model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "none" / "x"
    assert "does not exist" in _fails(run, model, "-p", "a", "--logits", missing)
    assert "does not exist" in _fails(run, model, "-p", "a", "--imatrix", missing)
    assert "it is the input itself" in _fails(run, model, "-p", "a", "--logits", model, "--force")
    assert "a device or a pipe" in _fails(run, model, "-p", "a", "--logits", "/dev/full")


def test_imatrix(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the cat sat on the mat " * 9)
    n_tokens = len(small_tokenizer().encode("the cat sat on the mat " * 9).ids)
    target = tmp_path / "i.mli"
    args = [model, "-f", tmp_path / "t.txt", "--imatrix", target]
    code, out, err = run(*args, "--ctx", 16)
    assert (code, out) == (0, "")
    assert err == f"wrote {target}: {n_tokens} tokens, {n_tokens} of them in the classifier\n"
    once = read(target)
    assert (once.layer_tokens, once.classifier_tokens) == (n_tokens, n_tokens)
    assert "exists already; --force" in _fails(run, *args)
    assert run(*args, "--append", "--no-logits", "--ctx", 16)[0] == 0
    twice = read(target)
    assert (twice.layer_tokens, twice.classifier_tokens) == (2 * n_tokens, n_tokens)
    np.testing.assert_allclose(twice.of(1, "ffn_in"), 2 * once.of(1, "ffn_in"))
    document = _document(run, *args, "--force", "-n", 2)
    assert document["generated_tokens"] == 2
    assert read(target).layer_tokens == n_tokens


def test_an_imatrix_of_many_files_is_that_of_one_text(run: Run, model: Path, tmp_path: Path) -> None:
    for name, text in (("b1.txt", "the cat sat"), ("b2.txt", " on the mat"), ("c.txt", " and sat"), ("a.txt", "all")):
        (tmp_path / name).write_text(text)
    (tmp_path / "whole.txt").write_text("the cat sat on the mat and sat")
    many = ("-f", tmp_path / "b*.txt", "-f", tmp_path / "c.txt")
    assert run(model, *many, "--imatrix", tmp_path / "many.mli", "--ctx", 16)[0] == 0
    assert run(model, "-f", tmp_path / "whole.txt", "--imatrix", tmp_path / "one.mli", "--ctx", 16)[0] == 0
    assert (tmp_path / "many.mli").read_bytes() == (tmp_path / "one.mli").read_bytes()


def test_a_broken_activation_leaves_the_older_file(run: Run, tmp_path: Path) -> None:
    header = replace(HEADERS["plain"], vocab=small_tokenizer().get_vocab_size())
    model = write_runnable(tmp_path, header)
    assert run(model, "--prompt-ids", "5,6", "--imatrix", tmp_path / "i.mli")[0] == 0
    before = (tmp_path / "i.mli").read_bytes()
    arrays = random_arrays(header)
    arrays["layers.1.ffn_norm"][7] = np.inf
    write_changed(model, header, arrays)
    for option in ("--append", "--force"):
        text = _fails(run, model, "--prompt-ids", "5,6", "--imatrix", tmp_path / "i.mli", option)
        assert text.startswith("layer 1: the input of w1 and w3 is ")
    assert (tmp_path / "i.mli").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i.mli", "m.json", "m.mlb", "m.tokenizer.json"]


def test_an_imatrix_of_another_model_is_not_added_to(run: Run, model: Path, tmp_path: Path) -> None:
    assert run(model, "--prompt-ids", "5", "--imatrix", tmp_path / "i.mli")[0] == 0
    (tmp_path / "other").mkdir()
    other = write_runnable(tmp_path / "other", replace(HEADERS["plain"], vocab=280, hidden_dim=64))
    text = _fails(run, other, "--prompt-ids", "5", "--imatrix", tmp_path / "i.mli", "--append")
    assert "is of another model: 3 layers, dim 64, hidden_dim 96, q_dim 128; this one has" in text


@pytest.mark.parametrize("name", ["m.json", "m.mlt", "m.mlb", "text.txt"])
def test_what_is_read_is_never_written_over(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("m.json", "m.mlt", "m.mlb", "text.txt"):
        (tmp_path / file).write_text("mine")
    model, text = str(tmp_path / "m.mlb"), str(tmp_path / "text.txt")
    for option in ("--logits", "--imatrix"):
        assert run_cli(["run", model, "-f", text, option, str(tmp_path / name), "--force"]) == 1
        assert "it is the input itself" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "mine"


def test_the_built_in_templates_are_named_in_the_help() -> None:
    from krafla_cli.cli import run
    from krafla_cli.tokenizer.templates import NAMES

    assert run._TEMPLATES == NAMES
