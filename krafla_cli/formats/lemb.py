"""Reading (memory-mapped), writing, validating and describing LEMB embedding models.

The layout is in ``lemb_layout.py``, the checks in ``lemb_check.py``.

Source: the LEMB specification, sections 2 to 5.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import DataError, UnsupportedError
from krafla_cli.formats.atomic import atomic_output
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.detect import check_kind
from krafla_cli.formats.faults import Report, fault_error
from krafla_cli.formats.layout import Layout
from krafla_cli.formats.lemb_check import (
    Contents,
    Section,
    check,
    hashes,
    parse_metadata,
    read_table,
)
from krafla_cli.formats.lemb_layout import (
    ALIGNMENT,
    HASH_BYTES,
    HEADER_BYTES,
    LAYOUT,
    MAX_TOKEN_BYTES,
    METADATA,
    SECTION_ENTRY_BYTES,
    TENSOR_SECTIONS,
    TOKENIZER_CONFIG,
    TOKENIZER_LAYOUT,
    TOKENIZER_VOCAB,
    Header,
    TensorSpec,
    TokenizerConfig,
    section_tensors,
)
from krafla_cli.formats.text import printable
from krafla_cli.formats.writer import AlignedWriter

Array: TypeAlias = npt.NDArray[Any]
PathLike: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class LembModel:
    """A whole model. ``arrays`` holds, by the names of ``lemb_layout.tensors``, the arrays as the file stores them.

    That is: float32, int8, or uint8 with packed codes, each of its spec's ``stored_shape``. ``vocab`` is in token-id
    order; ``metadata`` are the bytes of its section; ``sha256`` is what the file ends with, in hexadecimal.
    """

    header: Header
    vocab: tuple[str, ...]
    tokenizer: TokenizerConfig
    arrays: Mapping[str, Array] = field(repr=False)
    metadata: bytes | None = None
    sha256: str | None = None


def read(path: PathLike) -> LembModel:
    """The model in ``path``, its arrays as views of the mapped file.

    Raises FileError (cannot be opened), FormatError or ShapeError: the first fault. There is no partial load.
    """
    data = map_file(path)
    check_kind(path, data, "lemb")
    report = Report(str(path), "lemb")
    contents = check(data, report)
    report.raise_first()
    return _parse(data, contents)


def validate(path: PathLike) -> Report:
    """Every fault of the file, as far as going on is safe. Raises FileError when it cannot be opened."""
    data = map_file(path)
    report = Report(str(path), "lemb")
    check(data, report)
    return report


def _parse(data: memoryview, contents: Contents) -> LembModel:
    """The model in a file that has been checked."""
    content = {kind: data[s.offset : s.end] for kind, s in contents.sections.items()}
    header = Header.from_bytes(data)
    arrays = {
        spec.name: np.frombuffer(content[kind][spec.offset : spec.end], spec.dtype).reshape(spec.stored_shape)
        for kind in TENSOR_SECTIONS
        for spec in section_tensors(header, kind)
    }
    metadata = bytes(content[METADATA]) if METADATA in content else None
    tokenizer = TokenizerConfig.from_bytes(content[TOKENIZER_CONFIG])
    sha256 = bytes(data[-HASH_BYTES:]).hex()
    return LembModel(header, tuple(contents.tokens), tokenizer, arrays, metadata, sha256)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write(path: PathLike, model: LembModel, force: bool = False, inputs: tuple[Path, ...] = ()) -> str:
    """Writes ``model``; returns the SHA-256 that ends the file, in hexadecimal. The file appears when it is complete.

    Raises FormatError, ShapeError (the header or the arrays break a rule: nothing is written), UnsupportedError (a
    token over 255 bytes), DataError (a value that is not finite), FileError (exists already, cannot be written).
    """
    contents = _contents(model)
    with atomic_output(path, force, inputs) as f:
        out = AlignedWriter(f, ALIGNMENT)
        out.write(model.header.to_bytes())
        out.write(_table_bytes({kind: sum(c.nbytes for c in chunks) for kind, chunks in contents.items()}))
        for chunks in contents.values():
            out.pad()
            for chunk in chunks:
                out.write(chunk.data)
        digest = out.sha256
        out.write(bytes.fromhex(digest))
    return digest


def _contents(model: LembModel) -> dict[int, list[Array]]:
    """The arrays of each section, in file order, checked against the header and the rules of section 5."""
    header = model.header
    if len(model.vocab) != header.vocab_size:
        raise ValueError(f"{len(model.vocab)} tokens, the header has {header.vocab_size}")
    _refuse_faults(LAYOUT, header.values)
    _refuse_faults(TOKENIZER_LAYOUT, {**model.tokenizer.values, "vocab_size": header.vocab_size})
    contents = {
        TOKENIZER_VOCAB: [_as_bytes(vocab_bytes(model.vocab))],
        TOKENIZER_CONFIG: [_as_bytes(model.tokenizer.to_bytes())],
    }
    for kind in TENSOR_SECTIONS:
        specs = section_tensors(header, kind)
        if specs:
            contents[kind] = [_stored(model.arrays[s.name], s) for s in specs]
    if model.metadata is not None:
        contents[METADATA] = [_as_bytes(model.metadata)]
    return contents


def _refuse_faults(layout: Layout, values: Mapping[str, Any]) -> None:
    faults = list(layout.faults(values))
    if faults:
        raise fault_error("the model to be written", faults[0], 0)


def _stored(array: Array, spec: TensorSpec) -> Array:
    # A wrong type or shape is a defect of the caller; values that are not finite come from the user's checkpoint.
    if array.dtype != np.dtype(spec.dtype) or array.shape != spec.stored_shape:
        raise ValueError(f"{spec.name}: {array.dtype} {array.shape}, must be {spec.dtype} {spec.stored_shape}")
    if spec.encoding == "fp32" and not np.isfinite(array).all():
        raise DataError(f"{spec.name}: holds NaN or infinite values, which the format does not allow")
    return np.ascontiguousarray(array)


def _as_bytes(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)


def vocab_bytes(vocab: tuple[str, ...]) -> bytes:
    """Section 1: each entry as its length in a byte, then its UTF-8. Raises UnsupportedError: longer, not unique."""
    out = bytearray()
    seen: dict[str, int] = {}
    for token_id, token in enumerate(vocab):
        raw = token.encode("utf-8")
        if len(raw) > MAX_TOKEN_BYTES:
            raise UnsupportedError(
                f"token {token_id} ({printable(token, 40)}) has {len(raw)} bytes, the format holds {MAX_TOKEN_BYTES}"
            )
        if seen.setdefault(token, token_id) != token_id:
            raise UnsupportedError(f"tokens {seen[token]} and {token_id} are both {printable(token, 40)!r}")
        out.append(len(raw))
        out += raw
    return bytes(out)


def _table_bytes(lengths: Mapping[int, int]) -> bytes:
    """The section table for sections of these lengths, one after the other, each aligned."""
    table = bytearray(len(lengths).to_bytes(2, "little"))
    offset = HEADER_BYTES + 2 + SECTION_ENTRY_BYTES * len(lengths)
    for kind, length in lengths.items():
        offset += -offset % ALIGNMENT
        for value, n_bytes in ((kind, 2), (0, 2), (offset, 8), (length, 8)):
            table += value.to_bytes(n_bytes, "little")
        offset += length
    return bytes(table)


# ---------------------------------------------------------------------------------------------------------------------
# Describing


def describe(path: PathLike) -> dict[str, Any]:
    """What a file says of itself, ready for JSON: header, sections, metadata (as it is: not safe to print), hash.

    Raises FileError, FormatError or ShapeError: a file that is not valid is not described.
    """
    data = map_file(path)
    report = Report(str(path), "lemb")
    contents = check(data, report)
    report.raise_first()
    metadata = contents.sections.get(METADATA)
    return {
        "format": "lemb",
        "n_bytes": len(data),
        "header": _describe_header(Header.from_bytes(data)),
        "sections": [_describe_section(s) for s in read_table(data, report) or ()],
        "metadata": parse_metadata(bytes(data[metadata.offset : metadata.end])) if metadata else None,
        "sha256": hashes(data)[0],
    }


def _describe_header(header: Header) -> dict[str, Any]:
    return {
        "format_version": header.format_version,
        "model_id": header.name,
        "model_version": header.version,
        "license_id": header.license_id,
        "has_fingerprint": header.has_fingerprint,
        "kind": "transformer" if header.n_layers else "static",
        "embedding_quant": header.embedding_encoding,
        "weight_quant": header.weight_encoding if header.n_layers else None,
        "vocab_size": header.vocab_size,
        "d_model": header.d_model,
        "n_layers": header.n_layers,
        "n_heads": header.n_heads,
        "ffn_dim": header.ffn_dim,
        "output_dim": header.output_dim,
        "max_seq_len": header.max_seq_len,
        "matryoshka_dims": list(header.matryoshka_dims[: header.n_matryoshka]),
        "lower_case": header.lower_case,
        "strip_accents": header.strip_accents,
    }


def _describe_section(section: Section) -> dict[str, Any]:
    return {"type": section.type, "name": section.name, "offset": section.offset, "length": section.length}
