"""LEMB files: golden bytes, round trips, section sizes, and a crafted file for every check."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from krafla_cli.errors import DataError, FileError, FormatError, ShapeError, UnsupportedError
from krafla_cli.formats import lemb
from krafla_cli.formats.lemb_codes import first_reserved, pack_int4, pack_ternary, unpack_int4, unpack_ternary
from krafla_cli.formats.lemb_layout import (
    EMBEDDING_WEIGHTS,
    LAYERS,
    PROJECTION,
    TOKENIZER_CONFIG,
    TOKENIZER_VOCAB,
    Header,
    TokenizerConfig,
    section_bytes,
    tensors,
)
from tests.embed.students import TOKENIZER, VOCAB, RawFile, header_of, random_model


def golden_static_file() -> bytes:
    """A static model of two dimensions' worth of everything, byte for byte from the specification's tables."""
    header = struct.pack(
        "<4sHBBIHBBHHHBB8HIBBH16s",
        *(b"LEMB", 1, 3, 0, 5, 4, 0, 0, 0, 2, 9, 1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 7, 1, 2, 3, b"mini"),
    )
    vocab = b"\5[PAD]\5[UNK]\5[CLS]\5[SEP]\2\xc3\xa7"
    config = struct.pack("<5IHB", 1, 2, 3, 0, 1, 100, 2) + b"##"
    weights = bytes([0b00_01_10_00, 0, 0b01_01_01_01, 0b10_10_10_10, 0b00_00_00_01])
    contents = {
        1: vocab,
        2: config,
        3: weights,
        4: struct.pack("<5f", 1, 0, 0.5, 2, 4),
        6: struct.pack("<8f", 1, 1, 1, 1, 0, 0, 0, 0),
        7: struct.pack("<10f", *range(10)),
    }
    out = header + struct.pack("<H", len(contents))
    offset = 64 + 2 + 20 * len(contents)
    body = b""
    for kind, content in contents.items():
        pad = -offset % 8
        out += struct.pack("<HHQQ", kind, 0, offset + pad, len(content))
        body += bytes(pad) + content
        offset += pad + len(content)
    out += body
    return out + hashlib.sha256(out).digest()


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    path = tmp_path / "valid.bin"
    lemb.write(path, random_model(header_of("ternary", "ternary"), metadata=b'{"teacher": "t"}'))
    return path


def refused(tmp_path: Path, data: bytes) -> str:
    """Writes ``data``; returns the error that reading it gives, after checking that validate reports the same."""
    path = tmp_path / "crafted.bin"
    path.write_bytes(data)
    report = lemb.validate(path)
    assert not report.valid
    with pytest.raises(FormatError) as caught:
        lemb.read(path)
    assert caught.value.status == report.status
    assert str(report.faults[0]) in str(caught.value)
    return str(caught.value)


# --- reading and writing


def test_golden_file_reads(tmp_path: Path) -> None:
    path = tmp_path / "golden.bin"
    path.write_bytes(golden_static_file())
    model = lemb.read(path)
    assert (model.header.name, model.header.version, model.header.license_id) == ("mini", "1.2.3", 7)
    assert model.header.dims == (1, 2)
    assert model.header.lower_case
    assert not model.header.strip_accents
    assert not model.header.has_fingerprint
    assert model.vocab == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "ç")
    assert model.tokenizer == TokenizerConfig(1, 2, 3, 0, 1, 100, 2, "##")
    codes = unpack_ternary(model.arrays["embedding.weight"])
    assert codes.tolist() == [[0, -1, 1, 0], [0] * 4, [1] * 4, [-1] * 4, [1, 0, 0, 0]]
    assert model.arrays["embedding.scales"].tolist() == [1, 0, 0.5, 2, 4]
    assert model.arrays["projection.weight"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert model.arrays["projection.bias"].tolist() == [8, 9]


def test_golden_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "golden.bin").write_bytes(golden_static_file())
    digest = lemb.write(tmp_path / "again.bin", lemb.read(tmp_path / "golden.bin"))
    assert (tmp_path / "again.bin").read_bytes() == golden_static_file()
    assert digest == golden_static_file()[-32:].hex()


@pytest.mark.parametrize("n_layers", [0, 2])
@pytest.mark.parametrize("weights", ["fp32", "ternary"])
@pytest.mark.parametrize("embedding", ["fp32", "int8", "int4", "ternary"])
def test_round_trip(tmp_path: Path, embedding: str, weights: str, n_layers: int) -> None:
    model = random_model(header_of(embedding, weights, n_layers), metadata=b'{"a": 1}')
    lemb.write(tmp_path / "m.bin", model)
    again = lemb.read(tmp_path / "m.bin")
    assert (again.header, again.vocab, again.metadata) == (model.header, model.vocab, model.metadata)
    assert again.arrays.keys() == model.arrays.keys()
    assert all(np.array_equal(again.arrays[name], model.arrays[name]) for name in model.arrays)
    report = lemb.validate(tmp_path / "m.bin")
    assert report.status == "ML_OK"
    assert not report.warnings


def test_section_sizes_of_the_specifications_shape() -> None:
    """Section 9's shape; its table says 402 KB for the layers, section 5.5 gives 413,744 bytes."""
    header = Header(
        embedding_quant=2,
        weight_quant=1,
        vocab_size=32000,
        d_model=256,
        n_layers=2,
        n_heads=4,
        ffn_dim=1024,
        output_dim=384,
        max_seq_len=128,
    )
    # Two blocks of: ln1, ln2 (4 vectors), q, k, v, out (2-bit and scale), out.bias, up (2-bit, scale, bias), down.
    block = 4 * 1024 + 4 * (256 * 256 // 4 + 4) + 1024 + (1024 * 256 // 4 + 4 + 4096) + (256 * 1024 // 4 + 4 + 1024)
    assert section_bytes(header, LAYERS) == 2 * block == 413_744
    assert section_bytes(header, PROJECTION) == 384 * 256 * 4 + 384 * 4 == 394_752
    assert section_bytes(header, EMBEDDING_WEIGHTS) == 32000 * 128 == 4_096_000
    assert section_bytes(header, 4) == 128_000
    assert section_bytes(header, 6) == 2_048


def test_tensors_of_a_block_follow_section_5_5() -> None:
    names = [t.name for t in tensors(header_of(n_layers=1)) if t.section == LAYERS]
    block = """ln1.weight ln1.bias attn.q.weight attn.q.scale attn.k.weight attn.k.scale attn.v.weight attn.v.scale
    attn.out.weight attn.out.scale attn.out.bias ln2.weight ln2.bias ffn.up.weight ffn.up.scale ffn.up.bias
    ffn.down.weight ffn.down.scale ffn.down.bias"""
    assert names == [f"layers.0.{name}" for name in block.split()]


def test_sections_in_any_order_and_unknown_ones_are_read(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid)
    raw.sections = [*reversed(raw.sections), (99, b"new things"), (99, b"twice"), (100, b"")]
    (tmp_path / "other.bin").write_bytes(raw.to_bytes())
    assert lemb.validate(tmp_path / "other.bin").valid
    first, second = lemb.read(valid), lemb.read(tmp_path / "other.bin")
    assert all(np.array_equal(first.arrays[name], second.arrays[name]) for name in first.arrays)


def test_minus_8_and_minus_128_are_valid_codes(tmp_path: Path) -> None:
    for encoding, byte in (("int4", 0x88), ("int8", 0x80)):
        lemb.write(tmp_path / "m.bin", random_model(header_of(encoding, n_layers=0)), force=True)
        raw = RawFile.of(tmp_path / "m.bin").patch(EMBEDDING_WEIGHTS, 0, bytes([byte]))
        (tmp_path / "m.bin").write_bytes(raw.to_bytes())
        assert lemb.validate(tmp_path / "m.bin").valid
    assert unpack_int4(np.array([0x88], np.uint8)).tolist() == [-8, -8]


def test_fp32_matrices_ignore_their_scale(tmp_path: Path) -> None:
    model = random_model(header_of("fp32", "fp32"))
    lemb.write(tmp_path / "m.bin", model)
    spec = next(t for t in tensors(model.header) if t.name == "layers.0.attn.q.scale")
    raw = RawFile.of(tmp_path / "m.bin").patch(LAYERS, spec.offset, struct.pack("<f", float("nan")))
    (tmp_path / "nan.bin").write_bytes(raw.to_bytes())
    assert lemb.validate(tmp_path / "nan.bin").valid


def test_static_models_ignore_heads_ffn_and_weight_quant(tmp_path: Path) -> None:
    lemb.write(tmp_path / "m.bin", random_model(header_of(n_layers=0, n_heads=7, ffn_dim=3, weight_quant=9)))
    assert lemb.validate(tmp_path / "m.bin").valid


# --- packing of codes


def test_int4_nibbles_by_hand() -> None:
    packed = pack_int4(np.array([1, -1, 7, -7], np.int8))
    assert packed.tolist() == [0xF1, 0x97]
    assert unpack_int4(packed).tolist() == [1, -1, 7, -7]


def test_ternary_codes_by_hand() -> None:
    packed = pack_ternary(np.array([[1, 0, -1, 1]], np.int8))
    assert packed.tolist() == [[0b01_10_00_01]]
    assert unpack_ternary(packed).tolist() == [[1, 0, -1, 1]]


def test_first_reserved_code() -> None:
    assert first_reserved(np.array([0b10_01_10_01, 0b01_10_00_00], np.uint8)) is None
    for shift in range(0, 8, 2):
        assert first_reserved(np.array([0, 3 << shift, 0xFF], np.uint8)) == 1


# --- section 3's checks, one crafted file each


def test_check_1_magic(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid)
    raw.header[:4] = b"LEM\x1b"
    assert refused(tmp_path, raw.to_bytes()).endswith(r'magic at offset 0: must be "LEMB", is "LEM\x1b"')


@pytest.mark.parametrize("version", [0, 2, 256, 65535])
def test_check_2_version_with_the_supported_range(valid: Path, tmp_path: Path, version: int) -> None:
    raw = RawFile.of(valid)
    raw.header[4:6] = version.to_bytes(2, "little")
    assert refused(tmp_path, raw.to_bytes()).endswith(
        f"format_version at offset 4: is {version}, this tool reads 1 to 1"
    )


def test_check_3_heads(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid)
    raw.header[15] = 3
    assert "n_heads at offset 15: must divide d_model, is 3" in refused(tmp_path, raw.to_bytes())
    raw.header[15] = 0
    assert "n_heads at offset 15: must be at least 1, is 0" in refused(tmp_path, raw.to_bytes())


@pytest.mark.parametrize(
    ("dims", "n", "rule"),
    [
        ((8, 4), 2, "strictly ascending"),
        ((4, 4), 2, "strictly ascending"),
        ((0, 4), 2, "at least 1"),
        ((4, 13), 2, "must be at most output_dim"),
        ((4, 8, 9), 2, "must be 0 after the first n_matryoshka"),
    ],
)
def test_check_4_matryoshka(valid: Path, tmp_path: Path, dims: tuple[int, ...], n: int, rule: str) -> None:
    raw = RawFile.of(valid)
    raw.header[22] = n
    raw.header[24:40] = struct.pack("<8H", *dims, *[0] * (8 - len(dims)))
    message = refused(tmp_path, raw.to_bytes())
    assert "matryoshka_dims at offset 24" in message
    assert rule in message


def test_check_5_any_flipped_bit(tmp_path: Path) -> None:
    """One bit in every byte of the file: header, table, padding, sections and the hash itself."""
    path = tmp_path / "flipped.bin"
    small = header_of(
        "int4", "ternary", 1, d_model=4, ffn_dim=4, output_dim=2, n_matryoshka=0, matryoshka_dims=(0,) * 8
    )
    lemb.write(path, random_model(small, metadata=b"{}"))
    data = path.read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        with pytest.raises(FormatError):
            lemb.read(path)


def test_check_5_names_the_hash(valid: Path, tmp_path: Path) -> None:
    data = bytearray(valid.read_bytes())
    data[-40] ^= 1
    assert "SHA-256 at offset" in refused(tmp_path, bytes(data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r, n: (r[0], 0, 8, r[3]), "bytes 8 to"),  # over the header
        (lambda r, n: (r[0], 0, 66, r[3]), "bytes 66 to"),  # over the table
        (lambda r, n: (r[0], 0, n - 40, 32), "sections may use"),  # over the hash
        (lambda r, n: (r[0], 0, n + 8, r[3]), "sections may use"),
        (lambda r, n: (r[0], 0, r[2], 2**63), "sections may use"),
        (lambda r, n: (r[0], 0, 2**64 - 8, 16), "sections may use"),  # wraps 2^64
        (lambda r, n: (r[0], 0, r[2] + 1, r[3] - 1), "is no multiple of 8"),
        (lambda r, n: (r[0], 5, r[2], r[3]), "reserved must be 0, is 5"),
    ],
)
def test_check_6_places(valid: Path, tmp_path: Path, change, words: str) -> None:
    raw = RawFile.of(valid)
    table = raw.table()
    table[0] = change(table[0], len(raw.to_bytes()))
    assert words in refused(tmp_path, raw.to_bytes(table))


def test_check_6_overlaps(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid)
    table = raw.table()
    kind, _, offset, length = table[5]
    table[5] = (kind, 0, table[4][2], length)
    assert "inside the one before" in refused(tmp_path, raw.to_bytes(table))
    assert offset > table[4][2]


def test_check_6_more_sections_than_bytes(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid)
    data = bytearray(raw.to_bytes())
    data[64:66] = b"\xff\xff"
    data[-32:] = hashlib.sha256(data[:-32]).digest()
    assert "n_sections at offset 64: is 65535" in refused(tmp_path, bytes(data))


# --- what "a model that loads is correct" adds


@pytest.mark.parametrize("n_bytes", [0, 1, 63, 64, 97])
def test_too_short(valid: Path, tmp_path: Path, n_bytes: int) -> None:
    message = refused(tmp_path, valid.read_bytes()[:n_bytes])
    assert "need 98 bytes" in message
    assert ("is empty" in message) == (n_bytes == 0)


@pytest.mark.parametrize("change", [lambda d: d[:-100], lambda d: d + bytes(100), lambda d: d[:-1]])
def test_cut_off_or_longer(valid: Path, tmp_path: Path, change) -> None:
    assert "SHA-256" in refused(tmp_path, change(valid.read_bytes()))


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (6, b"\4", "embedding_quant at offset 6: must be 0 (fp32), 1 (int8), 2 (int4) or 3 (ternary), is 4"),
        (7, b"\2", "weight_quant at offset 7: must be 0 (fp32) or 1 (ternary), is 2"),
        (8, bytes(4), "vocab_size at offset 8: must be at least 1, is 0"),
        (12, bytes(2), "d_model at offset 12: must be at least 1, is 0"),
        (12, b"\x0e\0", "d_model at offset 12: must be a multiple of 4, is 14"),
        (16, b"\x1a\0", "ffn_dim at offset 16: must be a multiple of 4 with ternary weights, is 26"),
        (16, bytes(2), "ffn_dim at offset 16: must be at least 1, is 0"),
        (18, bytes(2), "output_dim at offset 18: must be at least 1, is 0"),
        (20, bytes(2), "max_seq_len at offset 20: must be at least 1, is 0"),
        (22, b"\x09", "n_matryoshka at offset 22: must be 0 to 8, is 9"),
        (23, b"\x08", "flags at offset 23: bits 3 to 7 are reserved and must be 0, is 8"),
        (48, b"\xff", "model_id at offset 48: must be UTF-8, padded with NUL bytes"),
        (48, b"a\0b", "model_id at offset 48: must be UTF-8, padded with NUL bytes"),
    ],
)
def test_header_rules(valid: Path, tmp_path: Path, offset: int, value: bytes, words: str) -> None:
    raw = RawFile.of(valid)
    raw.header[offset : offset + len(value)] = value
    assert words in refused(tmp_path, raw.to_bytes())


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, 6, 7])
def test_required_sections(valid: Path, tmp_path: Path, kind: int) -> None:
    raw = RawFile.of(valid)
    raw.sections = [s for s in raw.sections if s[0] != kind]
    assert "is missing" in refused(tmp_path, raw.to_bytes())


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, 6, 7, 8])
def test_sections_once(valid: Path, tmp_path: Path, kind: int) -> None:
    raw = RawFile.of(valid)
    raw.sections.append((kind, raw.section(kind)))
    assert "appears twice" in refused(tmp_path, raw.to_bytes())


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c + b"\0", lambda c: b""])
def test_lengths_are_exact(valid: Path, tmp_path: Path, kind: int, change) -> None:
    raw = RawFile.of(valid)
    refused(tmp_path, raw.replace(kind, change(raw.section(kind))).to_bytes())


def test_length_error_has_both_numbers(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid)
    data = raw.replace(PROJECTION, raw.section(PROJECTION)[:-4]).to_bytes()
    assert "section PROJECTION" in refused(tmp_path, data)
    assert "812 bytes, the header implies 816" in refused(tmp_path, data)


def test_scales_and_layers_that_the_header_excludes(valid: Path, tmp_path: Path) -> None:
    lemb.write(tmp_path / "static.bin", random_model(header_of("fp32", n_layers=0)))
    for kind, name in ((4, "EMBEDDING_SCALES"), (5, "LAYERS")):
        raw = RawFile.of(tmp_path / "static.bin")
        raw.sections.append((kind, bytes(8)))
        assert f"section {name}" in refused(tmp_path, raw.to_bytes())


def test_reserved_ternary_code(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid).patch(EMBEDDING_WEIGHTS, 5, b"\x0c")
    assert "embedding.weight" in refused(tmp_path, raw.to_bytes())
    spec = next(t for t in tensors(header_of("ternary", "ternary")) if t.name == "layers.1.ffn.up.weight")
    raw = RawFile.of(valid).patch(LAYERS, spec.offset + 2, b"\xc0")
    assert "byte 2 is 0xc0: code 11 is reserved" in refused(tmp_path, raw.to_bytes())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_floats_are_finite(tmp_path: Path, value: float) -> None:
    model = random_model(header_of("fp32", "fp32"))
    lemb.write(tmp_path / "fp32.bin", model)
    lemb.write(tmp_path / "int8.bin", random_model(header_of("int8", "ternary")))
    for file, header in (("fp32.bin", model.header), ("int8.bin", header_of("int8", "ternary"))):
        for spec in tensors(header):
            if spec.encoding == "fp32" and not spec.ignored:
                at = spec.end - 4
                raw = RawFile.of(tmp_path / file).patch(spec.section, at, struct.pack("<f", value))
                message = refused(tmp_path, raw.to_bytes())
                assert spec.name in message
                assert "must be finite" in message


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_weight_scales_are_positive(valid: Path, tmp_path: Path, value: float) -> None:
    spec = next(t for t in tensors(header_of("ternary", "ternary")) if t.name == "layers.1.ffn.up.scale")
    raw = RawFile.of(valid).patch(LAYERS, spec.offset, struct.pack("<f", value))
    assert f"layers.1.ffn.up.scale at offset {raw.table()[4][2] + spec.offset}: must be > 0" in refused(
        tmp_path, raw.to_bytes()
    )


def test_vocabulary_entries(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid).patch(TOKENIZER_VOCAB, 8, b"PAD")  # [UNK] becomes [PAD]
    assert 'entry 1 is "[PAD]" as is entry 0' in refused(tmp_path, raw.to_bytes())
    raw = RawFile.of(valid).patch(TOKENIZER_VOCAB, 1, b"\xff")
    assert r'entry 0 is "\xffPAD]", which is no valid UTF-8' in refused(tmp_path, raw.to_bytes())
    raw = RawFile.of(valid).patch(TOKENIZER_VOCAB, 0, b"\xff")
    assert f"ends inside entry 0 of {len(VOCAB)}" in refused(tmp_path, raw.to_bytes())


def test_huge_vocab_size_costs_nothing(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid)
    raw.header[8:12] = b"\xff\xff\xff\xff"
    path = tmp_path / "huge.bin"
    path.write_bytes(raw.to_bytes())
    words = [str(f) for f in lemb.validate(path).faults]
    assert any("of 4294967295" in w for w in words)
    assert any("the header implies 17179869180" in w for w in words)


@pytest.mark.parametrize("slot", range(5))
def test_token_ids_lie_inside_the_vocabulary(valid: Path, tmp_path: Path, slot: int) -> None:
    raw = RawFile.of(valid).patch(TOKENIZER_CONFIG, 4 * slot, struct.pack("<I", len(VOCAB)))
    name = ("unk", "cls", "sep", "pad", "mask")[slot]
    text = f"must be less than vocab_size, is {len(VOCAB)}; vocab_size is {len(VOCAB)}"
    message = refused(tmp_path, raw.to_bytes())
    assert f"{name}_token_id" in message
    assert text in message


def test_prefix_is_utf8_of_its_length(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid).patch(TOKENIZER_CONFIG, 23, b"\xff\xff")
    assert "the prefix is no valid UTF-8" in refused(tmp_path, raw.to_bytes())
    raw = RawFile.of(valid).patch(TOKENIZER_CONFIG, 22, b"\3")
    assert "25 bytes, must be 23 and the 3 of the prefix" in refused(tmp_path, raw.to_bytes())


def test_padding_is_zero(valid: Path, tmp_path: Path) -> None:
    assert "belong to no section and must be 0" in refused(tmp_path, RawFile.of(valid).to_bytes(padding=b"\1"))


def test_all_faults_are_listed(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid).patch(TOKENIZER_CONFIG, 0, b"\xff\xff\xff\xff").patch(EMBEDDING_WEIGHTS, 0, b"\3")
    raw.patch(PROJECTION, 0, struct.pack("<f", float("nan")))
    (tmp_path / "bad.bin").write_bytes(raw.to_bytes())
    found = {f.where for f in lemb.validate(tmp_path / "bad.bin").faults}
    assert found == {"unk_token_id", "embedding.weight", "projection.weight"}


@pytest.mark.parametrize("metadata", [b"{", b'{"a": NaN}', b"[1]", b"\xff", b"[" * 100_000, b""])
def test_bad_metadata_is_a_warning(valid: Path, tmp_path: Path, metadata: bytes) -> None:
    raw = RawFile.of(valid).replace(8, metadata)
    (tmp_path / "m.bin").write_bytes(raw.to_bytes())
    report = lemb.validate(tmp_path / "m.bin")
    assert report.valid
    assert "JSON" in str(report.warnings[0])
    assert lemb.read(tmp_path / "m.bin").metadata == metadata


def test_warnings(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid).patch(TOKENIZER_CONFIG, 12, struct.pack("<I", 2))  # [PAD] is [CLS]
    raw.header[23] = 1
    (tmp_path / "m.bin").write_bytes(raw.to_bytes())
    assert [w.where for w in lemb.validate(tmp_path / "m.bin").warnings] == ["license_id", "pad_token_id"]


def test_random_garbage_never_escapes_the_hierarchy(valid: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = valid.read_bytes()
    path = tmp_path / "garbage.bin"
    for _ in range(300):
        broken = bytearray(data)
        for position in rng.integers(4, 230, 4):  # header and table are where lengths are
            broken[position] = rng.integers(256)
        broken[-32:] = hashlib.sha256(broken[:-32]).digest()
        path.write_bytes(broken)
        if lemb.validate(path).valid:
            lemb.read(path)
        else:
            with pytest.raises(FormatError):
                lemb.read(path)


# --- writing refuses


def test_write_refuses_a_bad_header_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="n_heads at offset 15: must divide d_model, is 3"):
        lemb.write(tmp_path / "m.bin", random_model(header_of(n_heads=3)))
    assert not list(tmp_path.iterdir())


def test_write_refuses_long_and_double_tokens(tmp_path: Path) -> None:
    model = random_model(header_of())
    ids = TOKENIZER
    for vocab, words in (
        ((*VOCAB[:-1], "ü" * 128), "has 256 bytes, the format holds 255"),
        ((*VOCAB[:-1], "a"), "are both 'a'"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            lemb.write(tmp_path / "m.bin", lemb.LembModel(model.header, vocab, ids, model.arrays))
    assert not list(tmp_path.iterdir())


def test_write_refuses_values_that_are_not_finite(tmp_path: Path) -> None:
    model = random_model(header_of())
    arrays = dict(model.arrays)
    arrays["projection.bias"] = np.full(12, np.nan, np.float32)
    with pytest.raises(DataError, match=r"projection\.bias"):
        lemb.write(tmp_path / "m.bin", lemb.LembModel(model.header, VOCAB, TOKENIZER, arrays))


def test_write_does_not_overwrite(valid: Path) -> None:
    before = valid.read_bytes()
    with pytest.raises(FileError, match="exists already"):
        lemb.write(valid, random_model(header_of()))
    assert valid.read_bytes() == before


# --- describe


def test_describe_is_json(valid: Path) -> None:
    told = json.loads(json.dumps(lemb.describe(valid)))
    assert told["header"]["embedding_quant"] == "ternary"
    assert told["header"]["model_version"] == "1.2.0"
    assert told["header"]["has_fingerprint"] is False
    assert told["metadata"] == {"teacher": "t"}
    assert told["sha256"] == valid.read_bytes()[-32:].hex()
    assert [s["name"] for s in told["sections"]][-2:] == ["PROJECTION", "METADATA"]
    assert sum(s["length"] for s in told["sections"]) < told["n_bytes"]


def test_describe_refuses_a_file_with_faults(valid: Path, tmp_path: Path) -> None:
    raw = RawFile.of(valid)
    raw.header[6] = 9
    (tmp_path / "bad.bin").write_bytes(raw.to_bytes())
    with pytest.raises(FormatError, match="embedding_quant"):
        lemb.describe(tmp_path / "bad.bin")
