"""Perplexity and divergence against transformers, hand-computed windows and plain formulas."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from krafla_cli.errors import DataError, InputError
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.progress import SILENT
from krafla_cli.runtime import evaluation
from krafla_cli.runtime.engine import Engine, EngineOptions
from krafla_cli.runtime.evaluation import chunk_windows, evaluate, log_softmax, sliding_windows
from krafla_cli.runtime.reference import open_engine
from tests.helpers.models import random_model, tiny
from tests.helpers.twins import FAMILIES, transformers_model, write_twin

IDS = np.random.default_rng(3).integers(0, 101, 90).tolist()


def _engine(path: Path) -> Engine:
    return open_engine(open_mlb(path), EngineOptions(64), SILENT)


def _shape(windows: list) -> list[tuple[list[int], int]]:
    return [(w.ids.tolist(), w.first) for w in windows]


def test_sliding_windows_score_every_id_but_the_first_once() -> None:
    assert _shape(sliding_windows([0, 1, 2, 3, 4, 5, 6], 4, 2)) == [
        ([0, 1, 2, 3], 0),
        ([2, 3, 4, 5], 1),
        ([4, 5, 6], 1),
    ]
    assert _shape(sliding_windows([0, 1, 2], 4, 4)) == [([0, 1, 2], 0)]
    scored = [w.ids[w.first + 1 :].tolist() for w in sliding_windows(list(range(50)), 8, 3)]
    assert list(itertools.chain(*scored)) == list(range(1, 50))


def test_windows_that_do_not_overlap_lose_their_first_id() -> None:
    assert _shape(sliding_windows([0, 1, 2, 3, 4], 2, 2)) == [([0, 1], 0), ([2, 3], 0)]


def test_chunks_score_their_second_half() -> None:
    assert _shape(chunk_windows(list(range(10)), 4, [])) == [([0, 1, 2, 3], 2), ([4, 5, 6, 7], 2)]
    assert _shape(chunk_windows(list(range(10)), 4, [99])) == [([99, 1, 2, 3], 2), ([99, 5, 6, 7], 2)]


def test_impossible_windows() -> None:
    with pytest.raises(InputError, match="a stride of 5 with windows of 4 positions: must be 1 to 4"):
        sliding_windows(IDS, 4, 5)
    with pytest.raises(InputError, match="the text has 1 tokens, these windows need at least 2"):
        sliding_windows([1], 4, 2)
    with pytest.raises(InputError, match="the text has 90 tokens, these windows need at least 100"):
        chunk_windows(IDS, 100, [])


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_5"])
def test_perplexity_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = transformers_model(FAMILIES[name], 5)
    write_twin(tmp_path / "m.mlb", FAMILIES[name], model, wtype=2)
    total, count, scored_to = 0.0, 0, 0
    for begin in range(0, 90, 24):  # the loop of transformers' guide, its sums exact
        end = min(begin + 64, 90)
        ids = torch.tensor([IDS[begin:end]])
        labels = ids.clone()
        labels[:, : scored_to - begin] = -100
        n = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(ids, labels=labels).loss) * n
        count, scored_to = count + n, end
        if end == 90:
            break
    (score,) = evaluate([_engine(tmp_path / "m.mlb")], sliding_windows(IDS, 64, 24))
    assert score.n_tokens == count == 89
    assert score.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)


def test_divergence_and_agreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_MAX_LOGITS", 101 * 7)  # several batches a window
    random_model(tmp_path / "a.mlb", tiny(), seed=1)
    random_model(tmp_path / "b.mlb", tiny(wtype=2), seed=1)
    random_model(tmp_path / "c.mlb", tiny(), seed=1)
    a, b, c = (_engine(tmp_path / f"{name}.mlb") for name in "abc")
    windows = sliding_windows(IDS[:40], 20, 10)
    of_b, of_c, of_a = evaluate([b, c], windows, baseline=a)

    log_p, log_q = [], []
    for engine, into in ((a, log_p), (b, log_q)):
        for window in windows:
            engine.reset()
            logits = engine.forward(window.ids, "all")[window.first : -1].astype(np.float64)
            into.append(logits - np.log(np.exp(logits).sum(1, keepdims=True)))
    p, q = np.concatenate(log_p), np.concatenate(log_q)
    kl = (np.exp(p) * (p - q)).sum(1)
    targets = np.array(IDS[1:40])
    nll = -q[np.arange(39), targets]
    assert of_b.n_tokens == 39
    assert of_b.nll == pytest.approx(nll.mean(), rel=1e-5)
    assert of_b.perplexity_error == pytest.approx(math.exp(nll.mean()) * nll.std(ddof=1) / math.sqrt(39), rel=1e-5)
    assert of_b.divergence is not None
    assert of_b.divergence.kl == pytest.approx(kl.mean(), rel=1e-4)
    assert of_b.divergence.kl_error == pytest.approx(kl.std(ddof=1) / math.sqrt(39), rel=1e-4)
    assert of_b.divergence.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-4)
    assert of_b.divergence.top1_agreement == (p.argmax(1) == q.argmax(1)).mean()
    assert of_c.divergence is not None
    assert (of_c.divergence.kl, of_c.divergence.top1_agreement) == (0.0, 1.0)
    assert of_a.divergence is None
    assert of_a.perplexity == of_c.perplexity


def test_log_softmax_of_large_logits() -> None:
    log_p = log_softmax(np.array([[1000.0, 1000.0, -1000.0]], np.float32))
    assert log_p[0].tolist() == pytest.approx([-math.log(2), -math.log(2), -2000 - math.log(2)])


def test_broken_logits_are_an_error() -> None:
    with pytest.raises(DataError, match="logits are broken"):
        log_softmax(np.array([[1.0, np.nan]], np.float32))


def test_other_vocabularies_cannot_be_compared(tmp_path: Path) -> None:
    random_model(tmp_path / "a.mlb", tiny())
    random_model(tmp_path / "b.mlb", tiny(vocab=64))
    a, b = _engine(tmp_path / "a.mlb"), _engine(tmp_path / "b.mlb")
    with pytest.raises(InputError, match="vocabularies of 101 and 64 tokens"):
        evaluate([a, b], sliding_windows(IDS, 64, 64))
