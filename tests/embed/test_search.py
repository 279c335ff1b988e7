"""The search's scores and its choice of rows, against float64 and a full sort."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from krafla_cli.embed.search import Searcher, top_rows
from krafla_cli.errors import FormatError, InputError
from krafla_cli.formats.index_folder import INDEX_VERSION, IndexFolder, Manifest

RNG = np.random.default_rng(0)


def index_of(vectors: np.ndarray, scales: np.ndarray | None = None) -> IndexFolder:
    """An index in memory whose texts are the numbers of its rows."""
    lines = [b'{"text": "%d"}\n' % i for i in range(len(vectors))]
    dtype = "float32" if scales is None else "int8"
    manifest = Manifest(INDEX_VERSION, "m", "1.0.0", vectors.shape[1], 0, False, "0" * 64, "", dtype, len(vectors))
    offsets = np.cumsum([0, *map(len, lines)])
    scales = np.zeros(0, np.float32) if scales is None else scales
    return IndexFolder(Path("x"), manifest, vectors, scales, offsets, memoryview(b"".join(lines)))


@pytest.mark.parametrize(("n_rows", "dims"), [(1, 1), (3, 7), (5, 8), (2050, 12), (4099, 64), (9000, 3)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_scores_are_those_of_float64(n_rows: int, dims: int, dtype: str, n_threads: int) -> None:
    query = RNG.standard_normal(dims).astype(np.float32)
    if dtype == "int8":
        vectors, scales = RNG.integers(-128, 128, (n_rows, dims)).astype(np.int8), RNG.random(n_rows).astype(np.float32)
        exact = scales.astype(np.float64) * (vectors.astype(np.float64) @ query.astype(np.float64))
    else:
        vectors, scales = RNG.standard_normal((n_rows, dims)).astype(np.float32), None
        exact = vectors.astype(np.float64) @ query.astype(np.float64)
    got = Searcher(index_of(vectors, scales), n_threads).scores(query)
    assert np.allclose(got, exact, rtol=1e-13, atol=1e-11)


def test_scores_by_hand() -> None:
    searcher = Searcher(index_of(np.array([[1, 2], [0.5, -1]], np.float32)))
    assert searcher.scores(np.array([3, 4])).tolist() == [11, -2.5]
    searcher = Searcher(index_of(np.array([[1, 2], [-128, 127]], np.int8), np.array([0.5, 2], np.float32)))
    assert searcher.scores(np.array([3, 4])).tolist() == [5.5, 248]


def test_differences_that_float32_does_not_see() -> None:
    """1 + 2^-23 and 1 - 2^-24 sum up to what float32 would round away."""
    vectors = np.ones((3, 400), np.float32)
    vectors[1, 7] = np.nextafter(np.float32(1), np.float32(2))
    vectors[2, 399] = np.nextafter(np.float32(1), np.float32(0))
    hits = Searcher(index_of(vectors)).search(np.ones(400, np.float32), 3)
    assert [hit.row for hit in hits] == [1, 0, 2]


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 1000, 70000])
@pytest.mark.parametrize("k", [1, 2, 10, 300, 10**9])
@pytest.mark.parametrize("distinct", [2, 50, 10**9])
def test_the_best_rows_in_order_with_ties_by_row(n: int, k: int, distinct: int) -> None:
    scores = RNG.integers(-distinct, distinct, n).astype(np.float64)
    expected = np.lexsort((np.arange(n), -scores))[:k]
    assert np.array_equal(top_rows(scores, k), expected)


def test_search_is_a_brute_force_float64_search() -> None:
    """Many rows twice, so that ties have to be told by their rows."""
    half = RNG.standard_normal((3000, 20)).astype(np.float32)
    half /= np.linalg.norm(half, axis=1, keepdims=True)
    vectors = np.concatenate([half, half[::-1]])
    searcher = Searcher(index_of(vectors), 2)
    for k in (1, 7, 100, 6000):
        query = half[k % 3000] + RNG.standard_normal(20).astype(np.float32) / 10
        exact = (vectors.astype(np.float64) * query.astype(np.float64)).sum(axis=1)
        hits = searcher.search(query, k)
        assert [hit.row for hit in hits] == np.lexsort((np.arange(6000), -np.round(exact, 13)))[:k].tolist()
        assert np.allclose([hit.score for hit in hits], exact[[hit.row for hit in hits]], rtol=0, atol=1e-14)
        assert [hit.text for hit in hits] == [str(hit.row) for hit in hits]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(value: float) -> None:
    vectors = np.ones((5, 9), np.float32)
    vectors[3, 8] = value
    with pytest.raises(FormatError, match=r"x/vectors.npy: row 3 is not finite; build the index again"):
        Searcher(index_of(vectors)).search(np.ones(9), 1)


def test_a_query_of_another_width() -> None:
    with pytest.raises(InputError, match="the query has 8 dimensions, the index 9"):
        Searcher(index_of(np.ones((5, 9), np.float32))).scores(np.ones(8))
