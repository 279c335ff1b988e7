"""Parquet by pyarrow, an extra: texts out of a column, and shards of embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from krafla_cli.embed.texts import decoded
from krafla_cli.errors import FileError, FormatError, InputError, UsageError, os_reason
from krafla_cli.formats.text import printable

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    raise UsageError('Parquet files need pyarrow: pip install "krafla-cli[parquet]"') from None

Float32 = npt.NDArray[np.float32]

_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20  # a column of a row group is read in pieces of this size, not whole
# Views came with pyarrow 16.
_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, getattr(pa.types, "is_string_view", pa.types.is_string))
_KEY = b"mlb"  # of the JSON document in a shard's file metadata


def n_rows(path: Path, field: str, name: str) -> int:
    """Rows of the file, called ``name`` in messages.

    Raises FileError (cannot be opened), FormatError (no Parquet, no column of text ``field``).
    """
    with _opened(path, name) as file:
        _check_column(file, field, name)
        return int(file.metadata.num_rows)


def row_texts(path: Path, field: str, first: int, count: int, name: str) -> Iterator[str | FormatError]:
    """The texts of rows ``first`` to ``first + count``, or what is wrong with each; memory for a few rows at a time.

    Raises FileError, FormatError as :func:`n_rows`, and FormatError where the file's pages are broken: that row and
    the following ones cannot be read.
    """
    done = 0
    with _opened(path, name) as file:
        _check_column(file, field, name)
        try:
            for value in _values(file, field, first, count):
                done += 1
                yield _text(value, field, f"{name}: row {first + done}")
        except (pa.ArrowException, OSError) as error:
            reason = printable(" ".join(str(error).split()))
            raise FormatError(f"{name}: rows {first + done + 1} to {first + count}: {reason}") from error


def _opened(path: Path, name: str) -> Any:
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise FileError(f"cannot open {name}: {os_reason(error)}") from error
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{name}: no Parquet file: {printable(' '.join(str(error).split()))}") from error


def _check_column(file: Any, field: str, name: str) -> None:
    schema = file.schema_arrow
    if field not in schema.names:
        columns = ", ".join(printable(n, 40) for n in schema.names[:8])
        raise FormatError(
            f"{name}: has no column {printable(field, 40)!r} (it has: {columns or 'none'}); --field names another"
        )
    kind = schema.field(field).type
    value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(is_text(value_type) for is_text in _TEXT_TYPES):
        raise FormatError(f"{name}: column {printable(field, 40)!r} is no text but {printable(str(kind), 40)}")


def _values(file: Any, field: str, first: int, count: int) -> Iterator[bytes | None]:
    """The bytes of a column's rows, None for a null, of the row groups that hold them."""
    groups: list[int] = []
    start = position = 0
    for group in range(file.num_row_groups):
        end = position + file.metadata.row_group(group).num_rows
        if end > first and position < first + count:
            start = position if not groups else start
            groups.append(group)
        position = end
    skip, left = first - start, count
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=[field], use_threads=False):
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            continue
        column = batch.column(0).slice(skip, left)
        skip, left = 0, left - len(column)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        # As bytes: pyarrow takes what a file calls a string on trust.
        yield from column.cast(pa.large_binary()).to_pylist()
        if not left:
            return


def _text(value: bytes | None, field: str, where: str) -> str | FormatError:
    if value is None:
        return FormatError(f"{where}: field {printable(field, 40)!r} is null")
    try:
        return decoded(value, where)
    except FormatError as error:
        return error


# ---------------------------------------------------------------------------------------------------------------------
# Shards


@dataclass
class Rows:
    """Rows of a shard as they come: ids int64, SHA-256 of the texts (32 bytes each), vectors float32 [n, dims]."""

    ids: list[int]
    hashes: list[bytes]
    vectors: list[Float32]


def write_shard(file: BinaryIO, rows: Rows, dims: int, document: Mapping[str, Any]) -> None:
    """Writes a shard: columns id, text_sha256 and vector, ``document`` as JSON in the metadata.

    The bytes depend on nothing else (and the version of pyarrow). Vectors do not compress, so nothing is compressed.
    """
    n = len(rows.ids)
    vectors = np.concatenate(rows.vectors) if rows.vectors else np.zeros((0, dims), np.float32)
    # From buffers: from Python objects, pyarrow would first import pandas where there is one.
    columns = {
        "id": _array(pa.int64(), n, np.array(rows.ids, "<i8")),
        "text_sha256": _array(pa.binary(32), n, np.frombuffer(b"".join(rows.hashes), np.uint8)),
        "vector": pa.FixedSizeListArray.from_arrays(_array(pa.float32(), vectors.size, vectors), dims),
    }
    schema = pa.schema([(name, array.type) for name, array in columns.items()])
    table = pa.table(columns, schema.with_metadata({_KEY: json.dumps(document, sort_keys=True)}))
    pq.write_table(table, file, compression="none", use_dictionary=False, write_statistics=["id"])


def _array(kind: Any, n: int, values: Any) -> Any:
    return pa.Array.from_buffers(kind, n, [None, pa.py_buffer(np.ascontiguousarray(values))])


def shard_document(path: Path) -> dict[str, Any]:
    """The document in a shard's metadata. Raises FileError, InputError where it is no such file, or is cut short."""
    name = printable(str(path))
    try:
        with _opened(path, name) as file:
            metadata = file.schema_arrow.metadata or {}
            document = json.loads(metadata[_KEY])
            count = file.metadata.num_rows
    except (FormatError, KeyError, ValueError) as error:
        raise InputError(f"{name} is no shard of embeddings, or is damaged; remove it and run the command again") from (
            error
        )
    if not isinstance(document, dict) or document.get("count") != count:
        raise InputError(f"{name} is no shard of embeddings: it has {count} rows, its metadata does not say so")
    return document
