"""``mlb diff``: what differs between two files of one kind, and how much."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import InputError
from krafla_cli.formats.detect import detect
from krafla_cli.formats.mlb import TensorSpec
from krafla_cli.formats.mlb_file import MlbFile, open_mlb
from krafla_cli.formats.mli import read as read_imatrix
from krafla_cli.formats.mli import slot_name, slots
from krafla_cli.formats.mlt import read as read_tokenizer
from krafla_cli.formats.text import printable, printable_bytes
from krafla_cli.quant.matrix import dequantize

Rows = list[dict[str, Any]]
Document = dict[str, Any]
_CHUNK_WEIGHTS = 1 << 20


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Document:
    """The differences: "header" rows (field, a, b) and "tables" of what else differs; "same" where there are none.

    Raises FileError or FormatError for a file, InputError where the two are of different kinds.
    """
    kinds = detect(a), detect(b)
    if kinds[0] != kinds[1]:
        titles = f"{printable(str(a))} is a {kinds[0].title}, {printable(str(b))} a {kinds[1].title}"
        raise InputError(f"{titles}: only files of one kind can be compared")
    compare = _COMPARERS.get(kinds[0].kind, _compare_documents)
    tables = {title: rows for title, rows in compare(a, b).items() if rows}
    return {"a": str(a), "b": str(b), "kind": kinds[0].kind, "same": not tables, "tables": tables}


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> Rows:
    """Rows for the keys whose values differ, or that only one has."""
    keys = dict.fromkeys((*a, *b))
    return [{"field": k, "a": a.get(k), "b": b.get(k)} for k in keys if a.get(k) != b.get(k)]


# --- models


def _compare_models(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> dict[str, Rows]:
    one, other = open_mlb(a, scan=False), open_mlb(b, scan=False)
    header = _changed(one.header.values, other.header.values)
    if one.header.flags != other.header.flags:
        header.append({"field": "layer flags", "a": one.header.flags.hex(), "b": other.header.flags.hex()})
    return {"header": header, "tensors": list(_tensor_rows(one, other))}


def _tensor_rows(one: MlbFile, other: MlbFile) -> Iterable[dict[str, Any]]:
    """A row for each tensor that differs: in shape, in encoding, or in its values (how many, and how far)."""
    for name in dict.fromkeys((*one.tensors, *other.tensors)):
        a, b = one.tensors.get(name), other.tensors.get(name)
        row = {"tensor": name, "a": _in_words(a), "b": _in_words(b), "changed": None, "relative difference": None}
        if a is None or b is None or a.shape != b.shape:
            yield row
            continue
        changed, relative = _difference(one, other, a)
        if changed or a.encoding != b.encoding:
            yield row | {"changed": changed, "relative difference": relative}


def _in_words(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.encoding} {' x '.join(map(str, spec.shape))}"


def _difference(one: MlbFile, other: MlbFile, spec: TensorSpec) -> tuple[int, float]:
    """How many weights differ, and the root of their summed squared difference over the summed squares of ``one``."""
    n_changed, difference, total = 0, 0.0, 0.0
    cols = spec.shape[-1] if len(spec.shape) == 2 else 1
    step = max(1, _CHUNK_WEIGHTS // cols)
    for start in range(0, spec.shape[0], step):
        a, b = (_values(m, spec.name, slice(start, start + step)) for m in (one, other))
        n_changed += int(np.count_nonzero(a != b))
        difference += float(np.square(a - b, dtype=np.float64).sum())
        total += float(np.square(a, dtype=np.float64).sum())
    return n_changed, (difference / total) ** 0.5 if total else float(difference > 0)


def _values(model: MlbFile, name: str, rows: slice) -> npt.NDArray[np.float32]:
    spec = model.tensors[name]
    if not spec.is_quantized:
        if spec.encoding == "u8":
            return np.frombuffer(model.header.flags, np.uint8)[rows].astype(np.float32)
        return model.float32(name)[rows]
    matrix = model.quantized(name)
    q, d = matrix.q[rows], matrix.d[rows]
    return dequantize(q, d, spec.encoding, len(q), spec.shape[1])


# --- tokenizers, importance matrices, everything else


def _compare_tokenizers(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> dict[str, Rows]:
    one, other = read_tokenizer(a), read_tokenizer(b)
    fields = ("kind", "flags", "bos", "eos")
    counts = [{"tokens": len(m.tokens), "merges": len(m.merges)} for m in (one, other)]
    values = [{f: int(getattr(m, f)) for f in fields} | c for m, c in zip((one, other), counts, strict=True)]
    tokens: Rows = [
        {"id": i, "a": _token(s), "b": _token(t)}
        for i, (s, t) in enumerate(zip_longest(one.tokens, other.tokens))
        if s != t
    ]
    merges: Rows = [
        {"rank": rank, "a": _merge(s), "b": _merge(t)}
        for rank, (s, t) in enumerate(zip_longest(one.merges.tolist(), other.merges.tolist()))
        if s != t
    ]
    return {"header": _changed(*values), "tokens": tokens, "merges": merges}


def _token(token: Any) -> str:
    return "absent" if token is None else f"{printable_bytes(token.data)} (attr {token.attr})"


def _merge(rule: list[int] | None) -> str:
    return "absent" if rule is None else "{} + {} -> {}".format(*rule)


def _compare_imatrices(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> dict[str, Rows]:
    one, other = read_imatrix(a), read_imatrix(b)
    values = [
        {"model": str(m.dimensions), "layer_tokens": m.layer_tokens, "classifier_tokens": m.classifier_tokens}
        for m in (one, other)
    ]
    rows: Rows = []
    if one.dimensions == other.dimensions:
        for place in slots(one.dimensions):
            x, y = one.of(*place), other.of(*place)
            if not np.array_equal(x, y):
                norm = float(np.linalg.norm(x))
                relative = float(np.linalg.norm(x - y)) / norm if norm else 1.0
                rows.append(
                    {
                        "input": slot_name(*place),
                        "channels changed": int((x != y).sum()),
                        "relative difference": relative,
                    }
                )
    return {"header": _changed(*values), "inputs": rows}


def _compare_documents(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> dict[str, Rows]:
    """Any other format: the rows of what ``mlb inspect --tensors`` shows, side by side."""
    from krafla_cli.report.inspect import describe

    one, other = describe(a, None, True), describe(b, None, True)
    found = {
        "summary": _changed(one.get("summary", {}), other.get("summary", {})),
        "header": _changed(*({r["name"]: r["value"] for r in d.get("header", [])} for d in (one, other))),
    }
    for title in dict.fromkeys((*one["tables"], *other["tables"])):
        rows = [{str(next(iter(r.values()))): r for r in d["tables"].get(title, [])} for d in (one, other)]
        found[title] = _changed(*({k: str(v) for k, v in table.items()} for table in rows))
    if not any(found.values()) and not _same_bytes(a, b):
        found["bytes"] = [{"field": "contents", "a": "differ", "b": "differ"}]
    return found


def _same_bytes(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> bool:
    return filecmp.cmp(a, b, shallow=False)


_COMPARERS: dict[str, Callable[[str | os.PathLike[str], str | os.PathLike[str]], dict[str, Rows]]] = {
    "mlb": _compare_models,
    "mlt": _compare_tokenizers,
    "mli": _compare_imatrices,
}
