"""Packing: quantizers by the specification, options against the student, and fingerprints that keep every cosine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from krafla_cli.embed.forward import Encoder, cut
from krafla_cli.embed.pack import PackOptions, pack
from krafla_cli.errors import FormatError, InputError, ShapeError, UnsupportedError
from krafla_cli.formats import lemb
from krafla_cli.formats.lemb_codes import unpack_int4, unpack_ternary
from krafla_cli.progress import Progress
from krafla_cli.quant.lemb_rows import symmetric_rows, ternary_rows
from krafla_cli.quant.ternary import absmedian_ternary
from tests.embed.students import VOCAB, bert_tokenizer, config_of, header_of, random_weights, write_student
from tests.embed.test_forward import random_ids

KEY = bytes(range(32))


class Remarks(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return write_student(tmp_path / "student", seed=5)


def packed(source: Path, **options: Any) -> lemb.LembModel:
    return pack(source, PackOptions(**options)).model


# --- quantization


def test_ternary_weights_by_absmedian(student: Path) -> None:
    model = packed(student)
    for name, weight in random_weights(header_of(), seed=5).items():
        if name.endswith(("attn.q.weight", "attn.out.weight", "up.weight", "down.weight")):
            codes, scale = absmedian_ternary(weight)
            assert np.array_equal(unpack_ternary(model.arrays[name]), codes)
            assert model.arrays[name.removesuffix("weight") + "scale"] == scale
        elif name != "embedding.weight" and not name.startswith("layers"):
            assert np.array_equal(model.arrays[name], weight)


def test_fp32_weights_are_copied_with_scale_1(student: Path) -> None:
    model = packed(student, weight_quant="fp32", embedding_quant="fp32")
    for name, weight in random_weights(header_of(), seed=5).items():
        assert np.array_equal(model.arrays[name], weight)
    assert model.arrays["layers.1.ffn.up.scale"] == 1.0


@pytest.mark.parametrize("encoding", ["int8", "int4", "ternary"])
def test_embedding_rows(student: Path, encoding: str) -> None:
    model = packed(student, embedding_quant=encoding)
    rows = random_weights(header_of(), seed=5)["embedding.weight"]
    expected = ternary_rows(rows) if encoding == "ternary" else symmetric_rows(rows, 127 if encoding == "int8" else 7)
    unpack = {"int8": lambda codes: codes, "int4": unpack_int4, "ternary": unpack_ternary}[encoding]
    assert np.array_equal(unpack(model.arrays["embedding.weight"]), expected.codes)
    assert np.array_equal(model.arrays["embedding.scales"], expected.scales)


def test_the_gain_over_the_usual_ternary_threshold_is_reported(student: Path) -> None:
    result = pack(student, PackOptions(embedding_quant="ternary"))
    assert result.half_mean_error is not None
    assert 0 < result.embedding_error < result.half_mean_error
    assert pack(student, PackOptions(embedding_quant="fp32")).embedding_error == 0


@pytest.mark.parametrize("n_layers", [0, 2])
@pytest.mark.parametrize("encoding", ["fp32", "int8", "int4", "ternary"])
@pytest.mark.parametrize("weights", ["fp32", "ternary"])
def test_packed_files_are_valid(tmp_path: Path, n_layers: int, encoding: str, weights: str) -> None:
    source = write_student(tmp_path / "s", header_of(n_layers=n_layers))
    model = packed(source, embedding_quant=encoding, weight_quant=weights, license_id=3, fingerprint_key=KEY)
    lemb.write(tmp_path / "m.bin", model)
    report = lemb.validate(tmp_path / "m.bin")
    assert report.valid
    assert not report.warnings
    again = lemb.read(tmp_path / "m.bin")
    assert again.header == model.header
    assert again.header.has_fingerprint
    assert again.vocab == VOCAB


# --- options


def test_header_fields(student: Path) -> None:
    header = packed(
        student, matryoshka=(2, 12), max_seq_len=7, license_id=9, model_id="ünlü", version=(1, 2, 300)
    ).header
    assert (header.dims, header.max_seq_len, header.license_id) == ((2, 12), 7, 9)
    assert (header.name, header.version, header.has_fingerprint) == ("ünlü", "1.2.300", False)


def test_defaults_come_from_the_student(student: Path) -> None:
    header = packed(student).header
    assert (header.dims, header.max_seq_len, header.license_id) == ((4, 8, 12), 16, 0)
    assert (header.name, header.version) == ("student", "1.0.0")


def test_a_long_folder_name_is_cut_at_a_character(tmp_path: Path) -> None:
    source = write_student(tmp_path / ("x" * 15 + "üy"))
    assert packed(source).header.name == "x" * 15


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"matryoshka": (8, 4)}, ShapeError, "--matryoshka must ascend"),
        ({"matryoshka": (4, 16)}, ShapeError, "to at most output_dim 12, is 4, 16"),
        ({"matryoshka": tuple(range(1, 10))}, ShapeError, "9 widths, the format holds 8"),
        ({"model_id": "ü" * 9}, InputError, "has 18 bytes, the format holds 16"),
        ({"model_id": "a\0b"}, InputError, "must not contain NUL"),
        ({"fingerprint_key": KEY}, InputError, "a fingerprint needs a license id"),
        ({"metadata": b"[1]"}, FormatError, "metadata: must be a JSON object"),
        ({"metadata": b"\xff"}, FormatError, "metadata: must be a JSON object"),
    ],
)
def test_options_that_do_not_fit(student: Path, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        packed(student, **options)


def test_max_seq_len_must_come_from_somewhere(student: Path) -> None:
    config = config_of(header_of())
    del config["max_seq_len"]
    (student / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="give --max-seq-len"):
        packed(student)
    assert packed(student, max_seq_len=5).header.max_seq_len == 5


def test_an_ffn_width_that_ternary_cannot_hold(tmp_path: Path) -> None:
    source = write_student(tmp_path / "s", header_of(ffn_dim=26))
    with pytest.raises(UnsupportedError, match=r"ffn_dim 26 is no multiple of 4.*--weight-quant fp32"):
        packed(source)
    assert packed(source, weight_quant="fp32").header.ffn_dim == 26


@pytest.mark.parametrize("n_tokens", [23, 25])
def test_more_or_fewer_rows_than_tokens(student: Path, n_tokens: int) -> None:
    bert_tokenizer((*VOCAB, "new")[:n_tokens]).save(str(student / "tokenizer.json"))
    with pytest.raises(ShapeError, match=f"{n_tokens} tokens, the student has 24 embedding rows"):
        packed(student)


def test_a_token_over_255_bytes(student: Path, tmp_path: Path) -> None:
    bert_tokenizer((*VOCAB[:-1], "ü" * 128)).save(str(student / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match="has 256 bytes, the format holds 255"):
        lemb.write(tmp_path / "m.bin", packed(student))
    assert not (tmp_path / "m.bin").exists()


def test_case_and_accents(student: Path) -> None:
    bert_tokenizer(VOCAB, lowercase=True).save(str(student / "tokenizer.json"))
    remarks = Remarks()
    header = pack(student, PackOptions(), remarks).model.header
    assert (header.lower_case, header.strip_accents) == (True, True)
    assert "do_lower_case must be off for Turkish models" in remarks.texts[0]
    remarks = Remarks()
    header = pack(student, PackOptions(lower_case=False, strip_accents=False), remarks).model.header
    assert (header.lower_case, header.strip_accents) == (False, False)
    assert [t.split(" is on")[0] for t in remarks.texts] == ["lower-casing", "stripping of accents"]


def test_vocab_txt_is_cased_unless_told(student: Path) -> None:
    (student / "tokenizer.json").unlink()
    (student / "vocab.txt").write_text("\n".join(VOCAB))
    remarks = Remarks()
    assert pack(student, PackOptions(), remarks).model.header.flags == 0
    assert not remarks.texts
    assert pack(student, PackOptions(lower_case=True), remarks).model.header.lower_case
    assert len(remarks.texts) == 1  # the caveat, and nothing about an override


# --- fingerprints


@pytest.mark.parametrize("encoding", ["fp32", "int8", "int4", "ternary"])
def test_a_fingerprint_keeps_cosines_at_every_width(tmp_path: Path, encoding: str) -> None:
    """With a bias that matters, at full width and at every Matryoshka width, for whichever license."""
    rng = np.random.default_rng(0)
    source = write_student(tmp_path / "s", seed=1, **{"projection.bias": rng.normal(0, 3, 12).astype(np.float32)})
    texts = sorted((ids for seed in range(6) for ids in random_ids(seed)), key=len)
    plain = Encoder(packed(source, embedding_quant=encoding)).project(texts)
    for license_id in (1, 2, 0xFFFFFFFF):
        model = packed(source, embedding_quant=encoding, license_id=license_id, fingerprint_key=KEY)
        marked = Encoder(model).project(texts)
        for dims in model.header.dims:
            before, after = cut(plain, dims).astype(np.float64), cut(marked, dims).astype(np.float64)
            assert np.abs(before @ before.T - after @ after.T).max() <= 1e-6
            assert np.abs(before - after).max() > 0.1


def test_only_the_projection_is_marked(student: Path) -> None:
    plain, marked = packed(student), packed(student, license_id=1, fingerprint_key=KEY)
    differing = {n for n in plain.arrays if not np.array_equal(plain.arrays[n], marked.arrays[n])}
    assert differing == {"projection.weight", "projection.bias"}


def test_packing_is_repeatable(student: Path, tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        lemb.write(tmp_path / name, packed(student, license_id=1, fingerprint_key=KEY))
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_the_key_is_not_in_what_python_prints() -> None:
    options = PackOptions(license_id=1, fingerprint_key=KEY)
    assert KEY.hex() not in repr(options)
    assert repr(KEY) not in repr(options)


def test_rotation_overflow_is_refused(student: Path, tmp_path: Path) -> None:
    weights = random_weights(header_of(), seed=5)
    weights["projection.weight"] = np.full((12, 16), 3.4e38, np.float32)
    save_file(weights, student / "model.safetensors")
    model = packed(student, license_id=1, fingerprint_key=KEY)
    with pytest.raises(Exception, match=r"projection\.weight: holds NaN or infinite values"):
        lemb.write(tmp_path / "m.bin", model)
    assert not (tmp_path / "m.bin").exists()
