"""``mlb inspect --report``: one self-contained page about a .mlb model, without scripts and without the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.formats.mlb import LAYOUT, MATRIX_CLASS, TensorSpec, encode_meaning
from krafla_cli.formats.mlb_file import MlbFile
from krafla_cli.formats.mli import Imatrix, slot_name, slots
from krafla_cli.formats.text import human_bytes
from krafla_cli.report.imatrix import channel_rows
from krafla_cli.report.inspect import header_rows
from krafla_cli.report.mlb import memory, summary
from krafla_cli.report.svg import Tile, heat_table, histogram, size_map, text
from krafla_cli.report.tables import cell

_BINS_PER_OCTAVE = 8
_N_OUTLIERS = 15

_STYLE = """
:root { color-scheme: light dark; --back: #fbfbf9; --ink: #1c1d20; --soft: #5d6068; --line: #d9dad5;
  --heat-ink: #b5482a; }
@media (prefers-color-scheme: dark) {
  :root { --back: #17181b; --ink: #e8e8e4; --soft: #a0a3ab; --line: #35373d; --heat-ink: #e2714f; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { color: var(--soft); margin: .25rem 0 .75rem; max-width: 46rem; }
svg { width: 100%; height: auto; display: block; font: 13px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg text.end { text-anchor: end; } svg text.head { font-weight: 600; }
svg text.tile { fill: #fff; font-weight: 600; pointer-events: none; }
svg rect { stroke: var(--back); stroke-width: 1; } svg rect.bar { fill: #3f7cac; stroke: none; }
.c0 { fill: #33658a; } .c1 { fill: #8a5a33; } .c2 { fill: #4a7c59; } .c3 { fill: #7d4e7e; }
.c4 { fill: #a0522d; } .c5 { fill: #557a95; } .c6 { fill: #6b6f2a; } .c7 { fill: #5f5f6e; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; min-width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n, .heat td, .heat th + th { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.heat td {
  background: color-mix(in srgb, var(--heat-ink) var(--heat, 0%), transparent); }
.heat th { white-space: nowrap; font-weight: 500; }
"""


def page(
    model: MlbFile,
    ctx: int | None = None,
    errors: Mapping[str, float] | None = None,
    imatrix: Imatrix | None = None,
) -> str:
    """The page. ``errors``: of each tensor against its checkpoint; ``imatrix``: importance to show per layer."""
    h = model.header
    name = text(model.path.rsplit("/", 1)[-1])
    facts = summary(model) | memory(h, model.plan.end, ctx)
    sections = [
        f"<h1>{name}</h1><p>.mlb model, {human_bytes(len(model.data))} ({len(model.data):,} bytes)</p>",
        _pairs(facts),
        _section(
            "Where the bytes are", "Area is bytes; each class is divided into its layers.", size_map(tiles(model))
        ),
        _errors(model, errors),
        _scales(model),
        _outliers(model),
        _importance(imatrix),
        _header(model),
    ]
    body = "\n".join(s for s in sections if s)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def _section(title: str, explanation: str, content: str) -> str:
    return f"<h2>{text(title)}</h2><p>{text(explanation)}</p>{content}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; columns of numbers are set to the right."""
    right = [" class=n" if all(isinstance(row[i], (int, float)) for row in rows) else "" for i in range(len(columns))]
    head = "".join(f"<th{r}>{text(c)}</th>" for c, r in zip(columns, right, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{r}>{text(cell(v))}</td>' for v, r in zip(row, right, strict=True))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{text(k)}</th><td>{text(cell(v))}</td></tr>" for k, v in values.items())
    return f'<div class="scroll"><table>{rows}</table></div>'


def tiles(model: MlbFile) -> list[Tile]:
    """The size map: a tile for each matrix class and one for the rest, each made of its layers."""
    by_class: dict[str, dict[str, int]] = {}
    for spec in model.tensors.values():
        parts = by_class.setdefault(MATRIX_CLASS.get(spec.role, "norms, biases"), {})
        label = spec.role if spec.layer is None else f"layer {spec.layer} {spec.role}"
        parts[label] = parts.get(label, 0) + spec.total_bytes
    return [
        Tile(name, sum(parts.values()), tuple(Tile(f"{name}: {k}", v) for k, v in parts.items()))
        for name, parts in by_class.items()
    ]


def _quantized(model: MlbFile) -> list[TensorSpec]:
    return [s for s in model.tensors.values() if s.is_quantized]


def _errors(model: MlbFile, errors: Mapping[str, float] | None) -> str:
    if not errors:
        return ""
    roles = list(dict.fromkeys(s.role for s in _quantized(model) if s.layer is not None))
    rows: list[tuple[str, list[float | None]]] = [
        (f"layer {i}", [errors.get(f"layers.{i}.{role}") for role in roles]) for i in range(model.header.n_layers)
    ]
    outside = {s.name: errors.get(s.name) for s in _quantized(model) if s.layer is None}
    others = heat_table(list(outside), [("error", list(outside.values()))]) if outside else ""
    explanation = "Relative error of each matrix against the checkpoint: root of the squared error over the squares."
    return _section("Quantization error", explanation, heat_table(roles, rows) + others)


def _scales(model: MlbFile) -> str:
    """A histogram of the magnitudes of the scales of each class, in powers of two."""
    by_class: dict[str, list[npt.NDArray[np.float32]]] = {}
    for spec in _quantized(model):
        scales = np.abs(model.quantized(spec.name).d.astype(np.float32)).reshape(-1)
        by_class.setdefault(MATRIX_CLASS.get(spec.role, spec.role), []).append(scales)
    pictures = [_scale_histogram(name, np.concatenate(parts)) for name, parts in by_class.items()]
    grid = f'<div class="grid">{"".join(pictures)}</div>'
    return _section("Block scales", "How often each magnitude of scale occurs, as a power of two.", grid)


def _scale_histogram(name: str, scales: npt.NDArray[np.float32]) -> str:
    used = scales[(scales > 0) & np.isfinite(scales)]
    zeros = f", {len(scales) - len(used):,} zero" if len(used) < len(scales) else ""
    label = f"{name}: {len(scales):,} blocks{zeros}"
    if not len(used):
        return histogram([], 0, 1, label)
    bins = np.floor(np.log2(used) * _BINS_PER_OCTAVE).astype(int)
    low = int(bins.min())
    return histogram(np.bincount(bins - low).tolist(), low / _BINS_PER_OCTAVE, 1 / _BINS_PER_OCTAVE, label)


def outlier_rows(model: MlbFile, n_most: int = _N_OUTLIERS) -> list[tuple[str, int, float]]:
    """(tensor, row, largest scale of the row over the tensor's median scale), the largest ones first."""
    found: list[tuple[str, int, float]] = []
    for spec in _quantized(model):
        largest = np.abs(model.quantized(spec.name).d.astype(np.float32)).max(axis=1)
        median = float(np.median(largest))
        if median > 0:
            top = np.argsort(-largest, kind="stable")[:n_most]
            found += [(spec.name, int(row), float(largest[row]) / median) for row in top]
    return sorted(found, key=lambda row: -row[2])[:n_most]


def _outliers(model: MlbFile) -> str:
    rows = outlier_rows(model)
    explanation = "Rows whose largest scale stands out from the rows of their matrix: where quantization costs most."
    return (
        _section("Outlier rows", explanation, _table(("tensor", "row", "times the median row"), rows)) if rows else ""
    )


def _importance(imatrix: Imatrix | None) -> str:
    if imatrix is None:
        return ""
    shares = {row["input"]: row["share of top 1%"] for row in channel_rows(imatrix, 0)}
    names = list(imatrix.dimensions.slots)
    rows: list[tuple[str, list[float | None]]] = [
        (f"layer {i}", [shares[slot_name(i, n)] for n in names]) for i in range(imatrix.dimensions.n_layers)
    ]
    top = sorted(channel_rows(imatrix, 5), key=lambda r: -r["share of top 1%"])[:_N_OUTLIERS]
    channels = _table(
        ("input", "largest channels (times the mean)"), [(r["input"], r["channels (times the mean)"]) for r in top]
    )
    n_inputs = sum(1 for _ in slots(imatrix.dimensions))
    explanation = (
        f"Share of the summed squares that the largest hundredth of the channels has, over {imatrix.layer_tokens:,} "
        f"tokens and {n_inputs} inputs; 0.01 where all channels are alike."
    )
    return _section("Importance", explanation, heat_table(names, rows, ".3f") + channels)


def _header(model: MlbFile) -> str:
    rows = header_rows(LAYOUT, model.header.values, encode_meaning)
    keys = ("name", "offset", "value", "note", "meaning")
    return _section(
        "Header",
        "Every field of the file's header.",
        _table(("field", "offset", "value", "", "meaning"), [[r[k] for k in keys] for r in rows]),
    )
