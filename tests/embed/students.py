"""Random students and files made of them, for tests."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from krafla_cli.formats import lemb
from krafla_cli.formats.lemb_codes import pack_int4, pack_ternary
from krafla_cli.formats.lemb_layout import EMBEDDING_QUANTS, Header, TokenizerConfig, tensors

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    "merhaba",
    "dünya",
    "kedi",
    "köpek",
    "ev",
    "su",
    "ekmek",
    "hello",
    "world",
    "cat",
    "dog",
    "house",
    "water",
    "bread",
    "a",
    "b",
    "c",
    "##s",
    "##ler",
)
VOCAB = SPECIAL + WORDS
TOKENIZER = TokenizerConfig(unk_token_id=1, cls_token_id=2, sep_token_id=3, pad_token_id=0, mask_token_id=4)


def header_of(embedding: str = "fp32", weights: str = "fp32", n_layers: int = 2, **changes: Any) -> Header:
    values = {
        "embedding_quant": EMBEDDING_QUANTS.index(embedding),
        "weight_quant": ("fp32", "ternary").index(weights) if n_layers else 0,
        "vocab_size": len(VOCAB),
        "d_model": 16,
        "n_layers": n_layers,
        "n_heads": 2,
        "ffn_dim": 24,
        "output_dim": 12,
        "max_seq_len": 16,
        "n_matryoshka": 2,
        "matryoshka_dims": (4, 8, 0, 0, 0, 0, 0, 0),
        "version_minor": 2,
        "model_id": b"test".ljust(16, b"\0"),
    }
    return Header(**{**values, **changes})


def _random_array(rng: np.random.Generator, name: str, encoding: str, shape: tuple[int, ...]) -> Any:
    if encoding == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    if encoding == "int4":
        return pack_int4(rng.integers(-8, 8, shape).astype(np.int8))
    if encoding == "ternary":
        return pack_ternary(rng.integers(-1, 2, shape).astype(np.int8))
    if name.endswith((".scale", ".scales")):
        return rng.uniform(0.5, 2.0, shape).astype(np.float32)
    if name.endswith(("ln1.weight", "ln2.weight", "final_ln.weight")):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return (rng.standard_normal(shape) * 0.5).astype(np.float32)


def random_model(header: Header, seed: int = 0, metadata: bytes | None = None) -> lemb.LembModel:
    """A model with random arrays in the encodings that ``header`` asks for."""
    rng = np.random.default_rng(seed)
    arrays = {s.name: np.asarray(_random_array(rng, s.name, s.encoding, s.shape)) for s in tensors(header)}
    vocab = VOCAB if header.vocab_size == len(VOCAB) else tuple(f"t{i}" for i in range(header.vocab_size))
    return lemb.LembModel(header, vocab, TOKENIZER, arrays, metadata)


def config_of(header: Header) -> dict[str, Any]:
    names = ("vocab_size", "d_model", "n_layers", "n_heads", "ffn_dim", "output_dim", "max_seq_len")
    return {**{n: getattr(header, n) for n in names}, "matryoshka_dims": list(header.dims[:-1])}


def random_weights(header: Header, seed: int = 0) -> dict[str, Any]:
    """float32 weights of a student, by this format's names."""
    rng = np.random.default_rng(seed)
    plain = replace(header, embedding_quant=0, weight_quant=0)
    return {s.name: _random_array(rng, s.name, "fp32", s.shape) for s in tensors(plain) if not s.ignored}


def bert_tokenizer(vocab: Sequence[str], lowercase: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(WordPiece({t: i for i, t in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.add_special_tokens([t for t in SPECIAL if t in vocab])
    return tokenizer


def write_student(
    folder: Path, header: Header | None = None, seed: int = 0, vocab: Sequence[str] = VOCAB, **weights: Any
) -> Path:
    """A checkpoint folder: config.json, model.safetensors, tokenizer.json. ``weights`` replaces or adds tensors."""
    header = header or header_of()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(header)))
    save_file({**random_weights(header, seed), **weights}, folder / "model.safetensors")
    bert_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class RawFile:
    """A LEMB file as loose parts, to be changed and put together again with a right hash."""

    header: bytearray
    sections: list[tuple[int, bytes]]

    @staticmethod
    def of(path: Path) -> RawFile:
        data = path.read_bytes()
        (n,) = struct.unpack_from("<H", data, 64)
        entries = [struct.unpack_from("<HHQQ", data, 66 + 20 * i) for i in range(n)]
        return RawFile(bytearray(data[:64]), [(kind, data[o : o + length]) for kind, _, o, length in entries])

    def section(self, kind: int) -> bytes:
        return dict(self.sections)[kind]

    def replace(self, kind: int, content: bytes) -> RawFile:
        self.sections = [(k, content if k == kind else c) for k, c in self.sections]
        return self

    def patch(self, kind: int, offset: int, content: bytes) -> RawFile:
        old = self.section(kind)
        return self.replace(kind, old[:offset] + content + old[offset + len(content) :])

    def table(self) -> list[tuple[int, int, int, int]]:
        """type, reserved, offset, length of each section, one after the other."""
        offset, rows = 66 + 20 * len(self.sections), []
        for kind, content in self.sections:
            offset = -(-offset // 8) * 8
            rows.append((kind, 0, offset, len(content)))
            offset += len(content)
        return rows

    def to_bytes(self, table: list[tuple[int, int, int, int]] | None = None, padding: bytes = b"\0") -> bytes:
        rows = self.table()
        shown = rows if table is None else table
        out = bytes(self.header) + struct.pack("<H", len(shown))
        out += b"".join(struct.pack("<HHQQ", *row) for row in shown)
        for (_, _, offset, _), (_, content) in zip(rows, self.sections, strict=True):
            out += padding * (offset - len(out)) + content
        return out + hashlib.sha256(out).digest()
