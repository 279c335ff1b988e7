"""Student checkpoint -> LEMB model: quantize, fold the fingerprint in, name it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.embed.rotation import rotate, rotation
from krafla_cli.embed.student import Student, read_student, with_matryoshka
from krafla_cli.embed.vocabulary import Vocabulary, read_vocabulary
from krafla_cli.errors import FormatError, InputError, ShapeError, UnsupportedError
from krafla_cli.formats.lemb import LembModel
from krafla_cli.formats.lemb_check import parse_metadata
from krafla_cli.formats.lemb_codes import pack_int4, pack_ternary
from krafla_cli.formats.lemb_layout import (
    EMBEDDING_QUANTS,
    FLAG_FINGERPRINT,
    FLAG_LOWER_CASE,
    FLAG_STRIP_ACCENTS,
    WEIGHT_QUANTS,
    Header,
    tensors,
)
from krafla_cli.formats.text import printable
from krafla_cli.progress import SILENT, Progress
from krafla_cli.quant.lemb_rows import QuantizedRows, half_mean_rows, relative_error, symmetric_rows, ternary_rows
from krafla_cli.quant.ternary import absmedian_ternary

Float32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

MODEL_ID_BYTES = 16
_MAX_CODES = {"int8": 127, "int4": 7}
_ROWS_AT_ONCE = 8192
_TURKISH_CAVEAT = (
    "lower-casing is locale-dependent in Turkish (İ -> i, I -> ı): a plain lower-case makes i̇ (i and a combining dot) "
    "of İ, which is not what a Turkish tokenizer was trained on; do_lower_case must be off for Turkish models"
)


@dataclass(frozen=True)
class PackOptions:
    """What the user chooses; None means: as the checkpoint or its tokenizer says."""

    embedding_quant: str = "int4"
    weight_quant: str = "ternary"
    matryoshka: tuple[int, ...] | None = None
    max_seq_len: int | None = None
    lower_case: bool | None = None
    strip_accents: bool | None = None
    license_id: int = 0
    fingerprint_key: bytes | None = field(default=None, repr=False)
    model_id: str | None = None
    version: tuple[int, int, int] = (1, 0, 0)
    metadata: bytes | None = None


@dataclass(frozen=True)
class Packed:
    """The model, the files it came from, and the relative error of its embedding table.

    ``half_mean_error``: the same error with the usual ternary threshold of 0.5 x mean |w|, for comparison.
    """

    model: LembModel
    inputs: tuple[Path, ...]
    embedding_error: float
    half_mean_error: float | None


def pack(source: Path, options: PackOptions, progress: Progress = SILENT) -> Packed:
    """The LEMB model of the student in ``source``.

    Raises FileError, FormatError, ShapeError, UnsupportedError, DataError, each naming the file and the part; and
    InputError (an option that does not fit the student).
    """
    if options.metadata is not None and parse_metadata(options.metadata) is None:
        raise FormatError("metadata: must be a JSON object in UTF-8")
    student = read_student(source)
    vocabulary = read_vocabulary(student.folder, progress)
    n_tokens, n_rows = len(vocabulary.tokens), student.header.vocab_size
    if n_tokens != n_rows:
        raise ShapeError(
            f"{printable(str(vocabulary.path))}: {n_tokens} tokens, the student has {n_rows} embedding rows"
        )
    header = _header(student, vocabulary, options, progress)
    weights = dict(student.weights)
    if options.fingerprint_key is not None:
        _fold_fingerprint(weights, header, options.fingerprint_key)
    rows = _quantized_rows(weights["embedding.weight"], options.embedding_quant, progress)
    arrays = _arrays(header, weights, rows)
    model = LembModel(header, vocabulary.tokens, vocabulary.config, arrays, options.metadata)
    return Packed(
        model, (*student.files, vocabulary.path), *_errors(weights["embedding.weight"], rows, options.embedding_quant)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Header


def _header(student: Student, vocabulary: Vocabulary, options: PackOptions, progress: Progress) -> Header:
    header = student.header
    if options.matryoshka is not None:
        header = with_matryoshka(header, options.matryoshka, "--matryoshka")
    major, minor, patch = options.version
    header = replace(
        header,
        embedding_quant=EMBEDDING_QUANTS.index(options.embedding_quant),
        weight_quant=WEIGHT_QUANTS.index(options.weight_quant) if header.n_layers else 0,
        max_seq_len=_max_seq_len(student, options),
        flags=_flags(vocabulary, options, progress),
        license_id=options.license_id,
        version_major=major,
        version_minor=minor,
        version_patch=patch,
        model_id=_model_id(student.folder, options.model_id, progress),
    )
    if header.weight_encoding == "ternary" and header.ffn_dim % 4:
        raise UnsupportedError(
            f"ffn_dim {header.ffn_dim} is no multiple of 4, as ternary weights need; pack with --weight-quant fp32"
        )
    return header


def _max_seq_len(student: Student, options: PackOptions) -> int:
    value = student.header.max_seq_len if options.max_seq_len is None else options.max_seq_len
    if not 1 <= value <= 0xFFFF:
        raise InputError(f"max_seq_len is {value} (0: not in the config), must be 1 to 65535; give --max-seq-len")
    return value


def _flags(vocabulary: Vocabulary, options: PackOptions, progress: Progress) -> int:
    """The flag bits: as the options say, else as the tokenizer does, else cased with accents kept."""
    lower_case = _chosen(options.lower_case, vocabulary.lower_case, "lower-casing", progress)
    strip_accents = _chosen(options.strip_accents, vocabulary.strip_accents, "stripping of accents", progress)
    if lower_case:
        progress.warn(_TURKISH_CAVEAT)
    fingerprint = FLAG_FINGERPRINT if options.fingerprint_key is not None else 0
    return fingerprint | lower_case * FLAG_LOWER_CASE | strip_accents * FLAG_STRIP_ACCENTS


def _chosen(option: bool | None, of_tokenizer: bool | None, what: str, progress: Progress) -> bool:
    if option is None:
        return bool(of_tokenizer)
    if of_tokenizer is not None and option != of_tokenizer:
        state = ("off", "on")
        progress.warn(
            f"{what} is {state[of_tokenizer]} in the student's tokenizer, the option turns it {state[option]}"
        )
    return option


def _model_id(folder: Path, name: str | None, progress: Progress) -> bytes:
    raw = (name if name is not None else folder.resolve().name).encode("utf-8", errors="replace")
    if len(raw) > MODEL_ID_BYTES and name is not None:
        raise InputError(f"model id {printable(name, 40)!r} has {len(raw)} bytes, the format holds {MODEL_ID_BYTES}")
    if b"\0" in raw:
        raise InputError("the model id must not contain NUL")
    fitting = raw[:MODEL_ID_BYTES].decode("utf-8", errors="ignore")
    if name is None:
        progress.detail(f"model id: {printable(fitting)!r}, from the folder's name (--model-id gives another)")
    return fitting.encode().ljust(MODEL_ID_BYTES, b"\0")


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def _fold_fingerprint(weights: dict[str, Float32], header: Header, key: bytes) -> None:
    """Projection -> R projection, weight and bias: with the bias left out, cosines would change (section 7)."""
    if not header.license_id:
        raise InputError("a fingerprint needs a license id other than 0")
    blocks = rotation(key, header.license_id, header.dims)
    for name in ("projection.weight", "projection.bias"):
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused on writing
            weights[name] = rotate(weights[name].astype(np.float64), blocks).astype(np.float32)


def _quantized_rows(rows: Float32, encoding: str, progress: Progress) -> QuantizedRows | None:
    """The embedding table's codes and scales; None for fp32."""
    if encoding == "fp32":
        return None
    parts = []
    progress.start("quantizing the embedding table", len(rows), "row")
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE]
        parts.append(ternary_rows(part) if encoding == "ternary" else symmetric_rows(part, _MAX_CODES[encoding]))
        progress.advance(len(part))
    progress.finish()
    return QuantizedRows(np.concatenate([p.codes for p in parts]), np.concatenate([p.scales for p in parts]))


def _errors(rows: Float32, quantized: QuantizedRows | None, encoding: str) -> tuple[float, float | None]:
    if quantized is None:
        return 0.0, None
    usual = relative_error(rows, half_mean_rows(rows)) if encoding == "ternary" else None
    return relative_error(rows, quantized), usual


def _arrays(header: Header, weights: dict[str, Float32], rows: QuantizedRows | None) -> dict[str, Array]:
    """Every array that the header implies, as the file stores it."""
    arrays: dict[str, Array] = {}
    if rows is not None:
        packers = {"int8": lambda codes: codes, "int4": pack_int4, "ternary": pack_ternary}
        arrays["embedding.weight"] = packers[header.embedding_encoding](rows.codes)
        arrays["embedding.scales"] = rows.scales
    for spec in tensors(header):
        if spec.name in arrays or spec.name.endswith(".scale"):
            continue
        if spec.encoding == "ternary":
            codes, scale = absmedian_ternary(weights[spec.name])
            arrays[spec.name] = pack_ternary(codes)
            arrays[spec.name.removesuffix("weight") + "scale"] = np.asarray(scale)
        else:
            arrays[spec.name] = np.asarray(weights[spec.name], np.float32)
    for spec in tensors(header):
        arrays.setdefault(spec.name, np.ones((), np.float32))  # scales of fp32 matrices: 1, ignored on reading
    return arrays
