"""``mlb inspect`` of a .mlb model: header in words, sizes by class, bits per weight, memory, tensors."""

from __future__ import annotations

import os
from typing import Any

from krafla_cli.errors import InputError
from krafla_cli.formats.mlb import LAYOUT, MATRIX_CLASS, Header, TensorSpec, encode_meaning
from krafla_cli.formats.mlb_file import MlbFile, open_mlb
from krafla_cli.formats.text import human_bytes
from krafla_cli.report.inspect import Document, header_rows

_DEFAULT_CTX = 4096


def describe(path: str | os.PathLike[str], ctx: int | None, with_tensors: bool) -> Document:
    """The document of a model. Raises as :func:`~krafla_cli.formats.mlb_file.open_mlb`; InputError for a bad ctx."""
    model = open_mlb(path, scan=False)
    header = model.header
    tables: dict[str, list[dict[str, Any]]] = {"bytes by class": class_rows(model)}
    if with_tensors:
        tables["tensors"] = [tensor_row(spec) for spec in model.tensors.values()]
    return {
        "summary": summary(model) | memory(header, model.plan.end, ctx),
        "header": header_rows(LAYOUT, header.values, encode_meaning),
        "tables": tables,
    }


def summary(model: MlbFile) -> dict[str, Any]:
    """The model in a few lines."""
    h = model.header
    return {
        "weights": f"{model.n_weights:,}",
        "bits per weight": round(model.bits_per_weight, 3),
        "layers": layers_in_words(h),
        "heads": f"{h.n_heads} query, {h.n_kv_heads} key/value, of {h.head_size}",
        "scales": "f16" if h.scale_f16 else "f32",
        "classifier": "shared with tok_emb" if h.shared_classifier else "own weights (wcls)",
        "longest context": h.max_seq,
    }


def layers_in_words(h: Header) -> str:
    """ "24: 18 linear attention, 6 attention" and the like."""
    n_linear = sum(h.is_linear(i) for i in range(h.n_layers))
    n_window = sum(bool(h.window_of(i)) for i in range(h.n_layers))
    parts = [f"{n_linear} linear attention"] if n_linear else []
    if n_window:
        parts.append(f"{n_window} with a window of {h.sliding_window}")
    rest = h.n_layers - n_linear - n_window
    if parts and rest:
        parts.append(f"{rest} full attention")
    return f"{h.n_layers}" + (f": {', '.join(parts)}" if parts else "")


def memory(h: Header, file_bytes: int, ctx: int | None) -> dict[str, Any]:
    """Bytes that ``mlb run`` needs at a context of ``ctx`` positions: mapped file, cache (f16), recurrent state."""
    if ctx is not None and not 1 <= ctx <= h.max_seq:
        raise InputError(f"--ctx {ctx}: the model allows 1 to {h.max_seq}")
    n_positions = ctx or min(_DEFAULT_CTX, h.max_seq)
    n_linear = sum(h.is_linear(i) for i in range(h.n_layers))
    cache = (h.n_layers - n_linear) * 2 * h.kv_dim * n_positions * 2
    state = n_linear * 4 * (h.lin_v_heads * h.lin_k_dim * h.lin_v_dim + h.lin_qkv_size * max(h.lin_conv - 1, 0))
    parts = f"file {human_bytes(file_bytes)} (mapped) + cache {human_bytes(cache)}"
    parts += f" + state {human_bytes(state)}" if state else ""
    return {f"memory at {n_positions} positions": f"{human_bytes(file_bytes + cache + state)}: {parts}"}


def class_rows(model: MlbFile) -> list[dict[str, Any]]:
    """A row for each matrix class, and one for everything in float32."""
    rows: dict[str, dict[str, Any]] = {}
    for spec in model.tensors.values():
        other = "lb, la" if spec.encoding == "q8_0" else f"other {spec.encoding}"
        name = MATRIX_CLASS.get(spec.role, other)
        row = rows.setdefault(
            name, {"class": name, "encoding": spec.encoding, "weights": 0, "bytes": 0, "share %": 0.0}
        )
        row["weights"] += spec.n_weights
        row["bytes"] += spec.total_bytes
        row["share %"] = round(100 * row["bytes"] / model.plan.end, 2)
    return list(rows.values())


def tensor_row(spec: TensorSpec) -> dict[str, Any]:
    """The row of one tensor."""
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "encoding": spec.encoding,
        "offset": spec.offset,
        "bytes": spec.n_bytes,
        "scale offset": spec.scale_offset if spec.is_quantized else None,
        "scale bytes": spec.scale_bytes if spec.is_quantized else None,
    }
