"""Checks of LEMB files: the six of section 3, and all else that "a model that loads is correct" asks for."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO

import numpy as np

from krafla_cli.errors import FormatError
from krafla_cli.formats.cursor import Cursor
from krafla_cli.formats.faults import FORMAT, SHAPE, Fault, Report
from krafla_cli.formats.json_file import parse_json
from krafla_cli.formats.layout import shown
from krafla_cli.formats.lemb_codes import first_reserved
from krafla_cli.formats.lemb_layout import (
    ALIGNMENT,
    EMBEDDING_SCALES,
    FORMAT_VERSION,
    HASH_BYTES,
    HEADER_BYTES,
    LAYERS,
    LAYOUT,
    MAGIC,
    METADATA,
    SECTION_ENTRY_BYTES,
    SECTION_NAMES,
    TENSOR_SECTIONS,
    TOKENIZER_CONFIG,
    TOKENIZER_LAYOUT,
    TOKENIZER_VOCAB,
    Header,
    TensorSpec,
    section_bytes,
    section_tensors,
)
from krafla_cli.formats.text import printable_bytes
from krafla_cli.formats.values import rows_text, zero_rows

_MIN_BYTES = HEADER_BYTES + 2 + HASH_BYTES
_MAX_LISTED = 8  # faults of one kind that are listed one by one


@dataclass(frozen=True)
class Section:
    """An entry of the section table; ``entry_offset`` is the entry's own place in the file."""

    type: int
    offset: int
    length: int
    entry_offset: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def name(self) -> str:
        """The specification's name, "type 99" for a type that it does not know."""
        return SECTION_NAMES.get(self.type, f"type {self.type}")


@dataclass(frozen=True)
class Contents:
    """The sections of known type by their type, and the entries of TOKENIZER_VOCAB."""

    sections: dict[int, Section]
    tokens: list[str]


def check(data: memoryview, report: Report) -> Contents:
    """Adds every fault of the file to ``report``; returns what is in it, to be used only if the report is valid."""
    fault = start_fault(data)
    if fault is not None:
        report.faults.append(fault)
        return Contents({}, [])
    with ThreadPoolExecutor(1) as pool:  # hashing a model takes as long as parsing its vocabulary
        found = pool.submit(hashes, data)
        contents = _check_parts(data, report)
    _check_hash(*found.result(), len(data), report)
    return contents


def _check_parts(data: memoryview, report: Report) -> Contents:
    """:func:`check` but for the hash."""
    contents = Contents({}, [])
    header = Header.from_bytes(data)
    header_faults = list(LAYOUT.faults(header.values))
    report.faults.extend(header_faults)
    _warn_about_header(header, report)
    table = read_table(data, report)
    if table is None:
        return contents
    well_placed = _check_places(data, table, report)
    contents.sections.update(_check_presence(table, header, report))
    if not header_faults:
        for section in contents.sections.values():
            if section in well_placed:
                _check_content(data, header, section, report, contents.tokens)
    return contents


def start_fault(data: memoryview) -> Fault | None:
    """The fault that makes everything else meaningless: too short, another magic or another version."""
    if len(data) < _MIN_BYTES:
        what = f"the file has {len(data)} bytes" if len(data) else "the file is empty"
        return Fault(FORMAT, "header", 0, f"header, section table and hash need {_MIN_BYTES} bytes, {what}")
    if bytes(data[:4]) != MAGIC:
        return Fault(FORMAT, "magic", 0, f'must be "LEMB", is "{printable_bytes(bytes(data[:4]))}"')
    version = LAYOUT["format_version"].unpack(data)
    if version != FORMAT_VERSION:
        return Fault(
            FORMAT,
            "format_version",
            LAYOUT["format_version"].offset,
            f"is {version}, this tool reads {FORMAT_VERSION} to {FORMAT_VERSION}",
        )
    return None


def _warn_about_header(header: Header, report: Report) -> None:
    if header.has_fingerprint and not header.license_id:
        report.warn("license_id", LAYOUT["license_id"].offset, "is 0, but the flags say that there is a fingerprint")


def hashes(data: memoryview) -> tuple[str, str]:
    """The SHA-256 that the file ends with, and that of the bytes before it, in hexadecimal."""
    return bytes(data[-HASH_BYTES:]).hex(), hashlib.sha256(data[:-HASH_BYTES]).hexdigest()


def _check_hash(stored: str, computed: str, n_bytes: int, report: Report) -> None:
    """A hash that is wrong comes before all other faults, which may follow from it."""
    if stored != computed:
        text = (
            f"is {stored[:16]}..., the content's is {computed[:16]}...: the file was changed or cut off, get it again"
        )
        report.faults.insert(0, Fault(FORMAT, "SHA-256", n_bytes - HASH_BYTES, text))


# ---------------------------------------------------------------------------------------------------------------------
# The section table


def read_table(data: memoryview, report: Report) -> list[Section] | None:
    """The entries of the section table; None, with a fault, where it does not fit the file."""
    cursor = Cursor(data, report.path, HEADER_BYTES, len(data) - HASH_BYTES)
    n_sections = cursor.u16("n_sections")
    if n_sections * SECTION_ENTRY_BYTES > cursor.n_left:
        report.fault(
            FORMAT,
            "n_sections",
            HEADER_BYTES,
            f"is {n_sections}, which needs {n_sections * SECTION_ENTRY_BYTES} bytes; {cursor.n_left} are left",
        )
        return None
    table = []
    for _ in range(n_sections):
        entry_offset = cursor.offset
        kind, reserved, offset, length = cursor.unpack("HHQQ", "section table")
        section = Section(kind, offset, length, entry_offset)
        if reserved:
            report.fault(FORMAT, f"section {section.name}", entry_offset + 2, f"reserved must be 0, is {reserved}")
        table.append(section)
    return table


def table_end(table: list[Section]) -> int:
    """Offset just after the section table."""
    return HEADER_BYTES + 2 + len(table) * SECTION_ENTRY_BYTES


def _check_places(data: memoryview, table: list[Section], report: Report) -> set[Section]:
    """Sections lie between table and hash, aligned, apart, with zeros between them. Returns those within bounds."""
    first, last = table_end(table), len(data) - HASH_BYTES
    inside = []
    for s in table:
        if s.offset < first or s.end > last:
            place = f"bytes {s.offset} to {s.end}, sections may use {first} to {last}"
            report.fault(FORMAT, f"section {s.name}", s.entry_offset, place)
            continue
        if s.offset % ALIGNMENT:
            report.fault(FORMAT, f"section {s.name}", s.entry_offset, f"offset {s.offset} is no multiple of 8")
        inside.append(s)
    ordered = sorted(inside, key=lambda s: (s.offset, s.end))
    end = first
    for s in ordered:
        if s.offset < end and s.length:
            report.fault(FORMAT, f"section {s.name}", s.entry_offset, f"starts at {s.offset}, inside the one before")
        _check_zero(data, end, s.offset, report)
        end = max(end, s.end)
    if len(inside) == len(table):
        _check_zero(data, end, last, report)
    return set(inside)


def _check_zero(data: memoryview, start: int, end: int, report: Report) -> None:
    if start < end and np.frombuffer(data[start:end], np.uint8).any():
        report.fault(FORMAT, "padding", start, f"bytes {start} to {end} belong to no section and must be 0")


def _check_presence(table: list[Section], header: Header, report: Report) -> dict[int, Section]:
    """Every required section is there, and no known one twice. Returns the first of each known type."""
    sections: dict[int, Section] = {}
    for s in table:
        if s.type in sections:
            report.fault(FORMAT, f"section {s.name}", s.entry_offset, "appears twice")
        elif s.type in SECTION_NAMES:
            sections[s.type] = s
    for kind, name in SECTION_NAMES.items():
        if kind not in sections and _is_required(kind, header):
            report.fault(FORMAT, f"section {name}", None, "is missing")
    return sections


def _is_required(kind: int, header: Header) -> bool:
    if kind == EMBEDDING_SCALES:
        return header.embedding_quant != 0
    if kind == LAYERS:
        return header.n_layers > 0
    return kind != METADATA


# ---------------------------------------------------------------------------------------------------------------------
# The sections' content


def _check_content(data: memoryview, header: Header, section: Section, report: Report, tokens: list[str]) -> None:
    """Checks one section; ``tokens`` is filled with the vocabulary's."""
    content = data[section.offset : section.end]
    if section.type in TENSOR_SECTIONS:
        _check_tensors(content, header, section, report)
    elif section.type == TOKENIZER_VOCAB:
        tokens.extend(_check_vocab(content, header, section, report))
    elif section.type == TOKENIZER_CONFIG:
        faults = list(_tokenizer_faults(content, header, section))
        report.faults.extend(faults)
        if not faults:
            _warn_about_padding_token(content, section, report)
    else:
        _check_metadata(content, section, report)


def _check_tensors(content: memoryview, header: Header, section: Section, report: Report) -> None:
    expected = section_bytes(header, section.type)
    if section.length != expected:
        report.fault(
            SHAPE,
            f"section {section.name}",
            section.entry_offset,
            f"{section.length} bytes, the header implies {expected}",
        )
        return
    for spec in section_tensors(header, section.type):
        fault = None if spec.ignored else _tensor_fault(content[spec.offset : spec.end], spec, section)
        if fault is not None:
            report.faults.append(fault)
        elif len(spec.shape) == 2:
            rows = zero_rows(np.frombuffer(content[spec.offset : spec.end], spec.dtype).reshape(spec.stored_shape))
            if rows:
                report.warn(spec.name, section.offset + spec.offset, rows_text(rows))


def _tensor_fault(content: memoryview, spec: TensorSpec, section: Section) -> Fault | None:
    """The first bad value of an array, if there is one. Every int8 and int4 code is valid."""
    start = section.offset + spec.offset
    values = np.frombuffer(content, spec.dtype)
    if spec.encoding == "ternary":
        index = first_reserved(values)
        if index is not None:
            return Fault(FORMAT, spec.name, start + index, f"byte {index} is {values[index]:#04x}: code 11 is reserved")
    elif spec.encoding == "fp32":
        finite = np.isfinite(values)
        if not finite.all():
            index = int(np.argmin(finite))
            return Fault(FORMAT, spec.name, start + 4 * index, f"element {index} is {values[index]}, must be finite")
        if spec.name.endswith(".scale") and values[0] <= 0:
            # Section 6.3 divides by it, and defines it as 1 / max(median, 1e-5).
            return Fault(FORMAT, spec.name, start, f"must be > 0, is {shown(float(values[0]))}")
    return None


def _check_vocab(content: memoryview, header: Header, section: Section, report: Report) -> list[str]:
    """``vocab_size`` entries that fill the section, each valid UTF-8, no two alike. Returns them if they are."""
    where, raw = f"section {section.name}", bytes(content)
    tokens, end = vocab_entries(raw, header.vocab_size)
    if len(tokens) < header.vocab_size:
        text = f"ends inside entry {len(tokens)} of {header.vocab_size}"
        report.fault(FORMAT, where, section.offset + end, text)
        return []
    if end != len(raw):
        text = f"{section.length} bytes, {header.vocab_size} entries use {end}"
        report.fault(SHAPE, where, section.entry_offset, text)
    texts = _decoded(tokens)
    if texts is None or len(set(tokens)) < len(tokens):
        faults = list(_token_faults(tokens, section.offset))
        report.faults.extend(faults[:_MAX_LISTED])
        if len(faults) > _MAX_LISTED:
            report.fault(FORMAT, where, None, f"{len(faults) - _MAX_LISTED} more entries are wrong")
    return texts or []


def vocab_entries(raw: bytes, n: int) -> tuple[list[bytes], int]:
    """The first ``n`` entries of a TOKENIZER_VOCAB section, fewer where it ends; and the offset after the last."""
    read = BytesIO(raw).read
    tokens: list[bytes] = []
    with contextlib.suppress(IndexError):  # what an empty read of a length byte gives
        for _ in range(n):
            tokens.append(read(read(1)[0]))
    end = len(tokens) + sum(map(len, tokens))
    if tokens and raw[end - len(tokens[-1]) - 1] != len(tokens[-1]):  # the section ends inside it
        end -= len(tokens.pop()) + 1
    return tokens, end


def _decoded(tokens: list[bytes]) -> list[str] | None:
    """Tokens as text; None if one is no valid UTF-8. A line feed continues no character: all are decoded at once."""
    try:
        texts = b"\n".join(tokens).decode().split("\n")
        return texts if len(texts) == len(tokens) else [token.decode() for token in tokens]
    except UnicodeDecodeError:
        return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _token_faults(tokens: list[bytes], offset: int) -> Iterator[Fault]:
    where = f"section {SECTION_NAMES[TOKENIZER_VOCAB]}"
    seen: dict[bytes, int] = {}
    for token_id, token in enumerate(tokens):
        shown = f'entry {token_id} is "{printable_bytes(token)}"'
        if seen.setdefault(token, token_id) != token_id:
            yield Fault(FORMAT, where, offset, f"{shown} as is entry {seen[token]}")
        if not _is_utf8(token):
            yield Fault(FORMAT, where, offset, f"{shown}, which is no valid UTF-8")
        offset += 1 + len(token)


def _tokenizer_faults(content: memoryview, header: Header, section: Section) -> Iterator[Fault]:
    where, fixed = f"section {section.name}", TOKENIZER_LAYOUT.n_bytes
    n_prefix = content[fixed - 1] if len(content) >= fixed else 0
    if len(content) != fixed + n_prefix:
        text = f"{section.length} bytes, must be {fixed} and the {n_prefix} of the prefix"
        yield Fault(SHAPE, where, section.entry_offset, text)
        return
    values = {**TOKENIZER_LAYOUT.unpack(content), "vocab_size": header.vocab_size}
    for fault in TOKENIZER_LAYOUT.faults(values):
        message = f"{fault.message}; vocab_size is {header.vocab_size}"
        yield Fault(fault.status, fault.where, section.offset + (fault.offset or 0), message)
    if not _is_utf8(bytes(content[fixed:])):
        yield Fault(FORMAT, where, section.offset + fixed, "the prefix is no valid UTF-8")


def _warn_about_padding_token(content: memoryview, section: Section, report: Report) -> None:
    """A padding token that a text can contain shortens it: section 6.1 counts the ids that are not padding."""
    ids = TOKENIZER_LAYOUT.unpack(content)
    offset = section.offset + TOKENIZER_LAYOUT["pad_token_id"].offset
    for name in ("unk_token_id", "cls_token_id", "sep_token_id"):
        if ids[name] == ids["pad_token_id"]:
            report.warn("pad_token_id", offset, f"is {name} too: texts with that token lose their last ones")


def _check_metadata(content: memoryview, section: Section, report: Report) -> None:
    """Engines do not parse the metadata (section 5.8), so that bad metadata is a warning."""
    if parse_metadata(bytes(content)) is None:
        report.warn(f"section {section.name}", section.offset, "is no JSON object in UTF-8")


def parse_metadata(content: bytes) -> dict[str, object] | None:
    """The metadata as an object; None if it is not JSON or no object."""
    try:
        value = parse_json(content, "metadata", strict=True)
    except FormatError:
        return None
    return value if isinstance(value, dict) else None
