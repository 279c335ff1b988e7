"""Detection of fingerprints: found through every packing, and nothing found where there is nothing."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.embed.embedder import Embedder
from krafla_cli.embed.fingerprint import MIN_EVIDENCE, detect
from krafla_cli.embed.pack import PackOptions, pack
from krafla_cli.embed.probes import MIN_PROBES, probe_texts
from krafla_cli.embed.registry import License
from krafla_cli.errors import InputError
from krafla_cli.formats.lemb_layout import Header
from tests.embed.students import header_of, random_weights, write_student

QUANTS = ("fp32", "int8", "int4", "ternary")
STATIC = header_of(n_layers=0, d_model=32, output_dim=32, matryoshka_dims=(8, 16, *[0] * 6))
SEEDS = range(200, 203)  # of the students; nothing was chosen by them


def licenses(seed: int, n: int = 20) -> dict[int, License]:
    keys = {i: hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(1, n + 1)}
    return {i: License(i, f"customer {i}", key) for i, key in keys.items()}


def embedder(source: Path, quant: str, mark: License | None = None) -> Embedder:
    options = PackOptions(embedding_quant=quant)
    if mark is not None:
        options = PackOptions(embedding_quant=quant, license_id=mark.license_id, fingerprint_key=mark.key)
    return Embedder(pack(source, options).model)


def perturbed(folder: Path, header: Header, seed: int, amount: float) -> Path:
    rng = np.random.default_rng(seed)
    weights = random_weights(header, seed)
    noisy = {n: (w + amount * w.std() * rng.standard_normal(w.shape)).astype(np.float32) for n, w in weights.items()}
    return write_student(folder, header, seed, **noisy)


def check_found(folder: Path, header: Header, quant: str, seed: int, some: int) -> None:
    """``some`` of 20 licenses of one model, with the unmarked model in fp32 as the reference."""
    source = write_student(folder, header, seed)
    reference, known = embedder(source, "fp32"), licenses(seed)
    for mark in list(known.values())[:some]:
        found = detect(embedder(source, quant, mark), reference, known)
        assert found.match == mark
        assert found.scores[1].evidence < MIN_EVIDENCE - 1


@pytest.mark.parametrize("quant", QUANTS)
def test_licenses_are_found_through_every_packing(tmp_path: Path, quant: str) -> None:
    check_found(tmp_path / "s", STATIC, quant, seed=200, some=4)


@pytest.mark.slow
@pytest.mark.parametrize("header", [STATIC, header_of(d_model=32, output_dim=32, matryoshka_dims=(8, 16, *[0] * 6))])
@pytest.mark.parametrize("quant", QUANTS)
def test_every_license_is_found(tmp_path: Path, quant: str, header: Header) -> None:
    check_found(tmp_path / "s", header, quant, seed=202, some=20)


def test_the_same_packing_scores_zero(tmp_path: Path) -> None:
    source = write_student(tmp_path / "s", STATIC, seed=200)
    known = licenses(200, 3)
    found = detect(embedder(source, "ternary", known[2]), embedder(source, "ternary"), known)
    assert found.match == known[2]
    assert found.scores[0].total < 1e-6
    assert max(found.scores[0].blocks) < 1e-6
    assert found.procrustes < 1e-6
    assert found.scores[0].evidence == pytest.approx(32 / 3**0.5, rel=1e-6)
    assert found.margin is not None
    assert found.margin > 0.5
    assert found.unmarked > 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_no_match_where_there_is_no_mark_of_the_registry(tmp_path: Path, seed: int) -> None:
    source = write_student(tmp_path / "s", STATIC, seed)
    reference, known = embedder(source, "fp32"), licenses(seed)
    stranger = License(99, "unregistered", hashlib.sha256(b"stranger").digest())
    retrained = write_student(tmp_path / "r", STATIC, seed + 1000)
    suspects = {
        "unmarked": embedder(source, "fp32"),
        "unmarked, ternary": embedder(source, "ternary"),
        "unregistered key": embedder(source, "int8", stranger),
        "right license, another key": embedder(source, "int8", License(3, "x", stranger.key)),
        "retrained": embedder(retrained, "int8"),
        "retrained and marked": embedder(retrained, "int8", known[3]),
        "perturbed": embedder(perturbed(tmp_path / "p", STATIC, seed, 0.3), "int8"),
    }
    for what, suspect in suspects.items():
        found = detect(suspect, reference, known)
        assert found.match is None, what
        assert len(found.scores) == 20


def test_a_mark_survives_small_changes_of_the_weights(tmp_path: Path) -> None:
    known = licenses(201, 5)
    reference = embedder(write_student(tmp_path / "s", STATIC, 201), "fp32")
    suspect = embedder(perturbed(tmp_path / "p", STATIC, 201, 0.1), "int8", known[4])
    assert detect(suspect, reference, known).match == known[4]


@pytest.mark.parametrize("widths", [(16,), (4, 8, 24), ()])
def test_copies_with_other_matryoshka_widths_are_found(tmp_path: Path, widths: tuple[int, ...]) -> None:
    # Their rotation has other blocks than the reference's widths make.
    source, known = write_student(tmp_path / "s", STATIC, seed=200), licenses(200)
    options = PackOptions(matryoshka=widths, license_id=3, fingerprint_key=known[3].key)
    found = detect(Embedder(pack(source, options).model), embedder(source, "fp32"), known)
    assert found.match == known[3]
    assert found.scores[0].dims == (*widths, 32)
    assert found.scores[0].total < 0.5
    assert found.scores[1].evidence < MIN_EVIDENCE - 1


def test_a_changed_header_hides_no_mark(tmp_path: Path) -> None:
    source, known = write_student(tmp_path / "s", STATIC, seed=200), licenses(200)
    copy = embedder(source, "int8", known[3]).model
    header = replace(copy.header, n_matryoshka=0, matryoshka_dims=(0,) * 8)
    found = detect(Embedder(replace(copy, header=header)), embedder(source, "fp32"), known)
    assert found.match == known[3]
    assert found.scores[0].dims == (8, 16, 32)


def test_an_empty_registry_has_no_match(tmp_path: Path) -> None:
    reference = embedder(write_student(tmp_path / "s", STATIC), "fp32")
    found = detect(reference, reference, {})
    assert (found.match, found.margin, found.scores) == (None, None, ())
    assert found.unmarked == 0


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    known = licenses(1, 2)
    source = write_student(tmp_path / "s", STATIC)
    plain, marked = embedder(source, "fp32"), embedder(source, "fp32", known[1])
    with pytest.raises(InputError, match="the reference has a fingerprint itself"):
        detect(plain, marked, known)
    other = embedder(write_student(tmp_path / "o"), "fp32")
    with pytest.raises(InputError, match="embeddings have 12 values, the reference's 32"):
        detect(other, plain, known)
    tiny = embedder(write_student(tmp_path / "t", header_of(output_dim=10)), "fp32")
    with pytest.raises(InputError, match=r"too short to tell licenses apart: the evidence could reach 5\.8"):
        detect(tiny, tiny, known)


def test_probes_are_fixed() -> None:
    texts = probe_texts(MIN_PROBES)
    assert len(texts) == MIN_PROBES
    assert probe_texts(10) == texts[:10] == "ev su ekmek kedi köpek çocuk kadın adam okul kitap".split()
    assert probe_texts(2 * MIN_PROBES)[:MIN_PROBES] == texts
    assert len(set(texts)) > 0.9 * MIN_PROBES
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    assert digest == "2db8152198a548dda89dec1fe8f8eb2e4358d0f43a170097ef029fac1e4147e8"
