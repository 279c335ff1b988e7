"""From config and tensor names to a plan: the header, and for every tensor of the .mlb where its rows come from.

Everything that can be refused is refused here, before a weight is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.config import ModelConfig
from krafla_cli.convert.families.base import BUFFERS, NOT_TEXT, Family
from krafla_cli.convert.sources import Source
from krafla_cli.errors import FormatError, ShapeError, UnsupportedError
from krafla_cli.formats.layout import shown
from krafla_cli.formats.mlb import (
    BLOCK,
    LAYOUT,
    MATRIX_CLASS,
    MAX_SEQ,
    Q8_CLASSES,
    WTYPE_Q4_0,
    WTYPE_Q8_0,
    Header,
    TensorSpec,
    tensors,
)
from krafla_cli.formats.mlb_file import flag_rule
from krafla_cli.formats.text import printable
from krafla_cli.parts import Part, Transform
from krafla_cli.quant.ggml_blocks import block_order
from krafla_cli.rope import interleaved_order

_FLOATS = ("F32", "F16", "BF16")
# Where a checkpoint keeps the language model: alone, or inside an image-text model (old and new naming).
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEAD_PREFIXES = ("", "language_model.", "model.language_model.", "model.")
_HEAD_COUNTS = {"wq": "q", "bq": "q", "wk": "k", "bk": "k", "q_norm": "one", "k_norm": "one"}


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor is made: take ``rows`` and ``columns`` (all where None) of ``source``, transform, pad to the spec.

    ``source_rows``: how many rows the source has. ``plus_one``: 1 is added. ``transform``: what is done else.
    ``copied``: its blocks are those of the spec, and are kept.
    """

    spec: TensorSpec
    source: str
    source_rows: int
    rows: npt.NDArray[np.intp] | None
    plus_one: bool
    copied: bool = False
    columns: npt.NDArray[np.intp] | None = None
    transform: Transform | None = None


@dataclass(frozen=True)
class Plan:
    """A conversion, decided: the header with its flags, the tensors in file order, and remarks for people.

    ``options``: the user's, with a wtype. ``tied_head``: a classifier that is left out, since the embedding is in its
    place.
    """

    family: Family
    header: Header
    options: Options
    tensors: list[TensorPlan]
    remarks: list[str] = field(default_factory=list)
    tied_head: str | None = None


@dataclass(frozen=True)
class Options:
    """What the user chose. ``q4_rule`` None: the family's. ``q8_mask``: classes kept in Q8_0 with wtype q4.

    ``wtype`` None: q4, but matrices that the source has in Q8_0 stay so, class by class, or all. ``imatrix``: path of
    an MLI1 file; it implies the rule "fit". ``target_bpw``: in place of a q8_mask, the bits per weight that the best
    one may take.
    """

    wtype: str | None = None
    scales: str = "f16"
    q4_rule: str | None = None
    q8_mask: int = 0
    max_seq: int | None = None
    imatrix: str | None = None
    target_bpw: float | None = None


def make_plan(family: Family, config: ModelConfig, fields: dict[str, Any], source: Source, options: Options) -> Plan:
    """Decides everything. ``fields``: what ``family.header(config)`` gave.

    Raises FormatError, ShapeError or UnsupportedError, naming the key or tensor.
    """
    if options.wtype is not None:
        return _make_plan(family, config, fields, source, options)
    plan = _make_plan(family, config, fields, source, replace(options, wtype="q4"))
    q8_classes, is_q8 = _stored_as_q8(plan, source)
    if options.q8_mask or not (q8_classes or is_q8):
        return plan
    chosen = replace(options, wtype="q8") if is_q8 else replace(options, wtype="q4", q8_mask=q8_classes)
    return _make_plan(family, config, fields, source, chosen)


def _stored_as_q8(plan: Plan, source: Source) -> tuple[int, bool]:
    """The bits of the classes all of whose matrices the source has in Q8_0 blocks; and whether it is a Q8_0 model.

    It is one too where some matrices, not most, are plain floats: those whose rows or columns do not fit blocks.
    """
    matrices = [t for t in plan.tensors if t.spec.role in MATRIX_CLASS]
    other = [t for t in matrices if source.block_encoding(t.source) != "q8_0"]
    classes = {MATRIX_CLASS[t.spec.role] for t in matrices} - {MATRIX_CLASS[t.spec.role] for t in other}
    is_q8 = 2 * len(other) < len(matrices) and all(source.dtype(t.source) in _FLOATS for t in other)
    return sum(Q8_CLASSES[c] for c in classes), is_q8


def _make_plan(family: Family, config: ModelConfig, fields: dict[str, Any], source: Source, options: Options) -> Plan:
    remarks: list[str] = []
    fields = dict(fields)
    hidden = fields["hidden_dim"]
    prefix = _prefix(source, family)
    fields["vocab"] = _vocab(config, source, prefix + family.parts["tok_emb"].name, fields["dim"])
    header = _header(config, fields, options, remarks)
    if header.hidden_dim != hidden:
        remarks.append(f"hidden_dim {hidden} is zero-padded to {header.hidden_dim}, a multiple of {BLOCK} (exact)")
    namer = _Namer(family, prefix, source, header, hidden)
    plans = [namer.plan(spec) for spec in tensors(header) if spec.role != "layer_flags"]
    remarks += _check_all_used(family, source, plans, header)
    remarks += _stored_blocks(source, plans, options)
    tied_head = next((n for n in source.shapes() if _is_head(n)), None) if header.shared_classifier else None
    return Plan(family, header, options, plans, remarks, tied_head)


def _prefix(source: Source, family: Family) -> str:
    name = family.parts["tok_emb"].name
    for prefix in _PREFIXES:
        if prefix + name in source.shapes():
            return prefix
    raise FormatError(f"{source.title}: tensor {_PREFIXES[0]}{name} is missing")


def _vocab(config: ModelConfig, source: Source, name: str, dim: int) -> int:
    """Rows of the embedding. A config that says otherwise is refused; -1 and null say nothing."""
    shape = source.settled_shape(name, (-1, dim))
    source.check_weights(name)  # of a type that is not known the number of weights is not, either
    rows = shape[0] if shape else 0
    stated = config.optional_integer("vocab_size", least=-1) if config.has("vocab_size") else None
    if stated is not None and stated > 0 and stated != rows:
        raise ShapeError(f"{config.where}: vocab_size is {stated}, {printable(name)} has {rows} rows")
    return rows


def _header(config: ModelConfig, fields: dict[str, Any], options: Options, remarks: list[str]) -> Header:
    """The header of the fields and options; every broken rule of the format is named with the config's file."""
    fields["hidden_dim"] = -(-fields["hidden_dim"] // BLOCK) * BLOCK
    fields["max_seq"] = _max_seq(fields["max_seq"], options, remarks)
    header = Header(
        **fields,
        wtype=WTYPE_Q8_0 if options.wtype == "q8" else WTYPE_Q4_0,
        scale_f16=int(options.scales == "f16"),
        q8_mask=options.q8_mask,
    )
    stored = _as_stored(header)
    fault = next(LAYOUT.faults(stored), None)
    if fault is not None:
        kind = ShapeError if fault.status == ShapeError.status else FormatError
        raise kind(f"{config.where}: cannot be stored: {fault.where}: {fault.message}")
    _check_flags(replace(header, **stored), config)
    return header


def _check_flags(header: Header, config: ModelConfig) -> None:
    for layer, flags in enumerate(header.flags):
        rule = flag_rule(header, flags)
        if rule is not None:
            raise FormatError(f"{config.where}: cannot be stored: flags of layer {layer}: {rule}")


def _as_stored(header: Header) -> dict[str, Any]:
    """The header's values as they come back from the file: integers must fit, floats are rounded to float32."""
    values = header.values
    for entry in LAYOUT.fields:
        value = values[entry.name]
        if entry.code == "I" and not 0 <= value < 1 << 32:
            raise ShapeError(f"{entry.name}: {shown(value)} does not fit the format's 32 bits")
        if entry.code == "f":
            with np.errstate(over="ignore"):
                values[entry.name] = float(np.float32(value))
    return values


def _max_seq(max_seq: int, options: Options, remarks: list[str]) -> int:
    if options.max_seq is None:
        return min(max_seq, MAX_SEQ)
    if options.max_seq > max_seq:
        remarks.append(f"--max-seq {options.max_seq} is more than the {max_seq} positions that the model was made for")
    return options.max_seq


class _Namer:
    """Finds the source of each tensor and checks its shape."""

    def __init__(self, family: Family, prefix: str, source: Source, header: Header, hidden: int) -> None:
        self.family = family
        self.prefix = prefix
        self.source = source
        self.header = dataclasses.replace(header, hidden_dim=hidden)  # as in the checkpoint, not padded

    def plan(self, spec: TensorSpec) -> TensorPlan:
        part = self.family.parts.get(spec.role)
        if part is None:
            raise ValueError(f"family {self.family.name} has no source for {spec.role}")
        name = self._name(part, spec)
        shape = self._source_shape(part, spec)
        self.source.shape(name)  # it is there
        self.source.check_weights(name)
        found = self.source.settled_shape(name, shape)
        if found != shape:
            raise ShapeError(f"{self.source.title}: {printable(name)} has shape {list(found)}, must be {list(shape)}")
        columns = part.columns(self.header) if part.columns else None
        same_blocks = self.source.block_encoding(name) == spec.encoding and found[-1] == spec.shape[-1]
        copied = same_blocks and not part.plus_one and (columns is None or block_order(columns) is not None)
        rows = self._rows(part, spec)
        return TensorPlan(spec, name, shape[0], rows, part.plus_one, copied, columns, part.kept_as)

    def _name(self, part: Part, spec: TensorSpec) -> str:
        if spec.role != "wcls":
            return self.prefix + part.name.format(i=spec.layer)
        candidates = [p + part.name for p in _HEAD_PREFIXES]
        name = next((n for n in candidates if n in self.source.shapes()), None)
        if name is None:
            raise FormatError(
                f"{self.source.title}: tensor {part.name} is missing, and tie_word_embeddings is false: the classifier "
                "has no weights"
            )
        return name

    def _source_shape(self, part: Part, spec: TensorSpec) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        shape = list(spec.shape)
        if spec.role in ("w1", "w3"):
            shape[0] = self.header.hidden_dim
        if spec.role == "w2":
            shape[1] = self.header.hidden_dim
        if part.source_rows is not None:
            shape[0] = part.source_rows(self.header)
        if part.middle_axis:
            shape.insert(1, 1)
        return tuple(shape)

    def _rows(self, part: Part, spec: TensorSpec) -> npt.NDArray[np.intp] | None:
        """Checkpoint rows in the order of the .mlb: the part's selection, then rotate-half to interleaved."""
        selected = part.rows(self.header) if part.rows else None
        if spec.role not in _HEAD_COUNTS or self.family.layout.interleaved:
            return selected
        h = self.header
        n_heads = {"q": h.n_heads, "k": h.n_kv_heads, "one": 1}[_HEAD_COUNTS[spec.role]]
        order = interleaved_order(n_heads, h.head_size, h.rot_size)
        return order if selected is None else selected[order]


def _is_head(name: str) -> bool:
    return name.endswith("lm_head.weight")


def _check_all_used(family: Family, source: Source, plans: list[TensorPlan], header: Header) -> Iterator[str]:
    """Nothing of a checkpoint is dropped in silence: unknown tensors are refused, known ones named in a remark."""
    used = {p.source for p in plans}
    left: dict[str, int] = {}
    for name in source.shapes():
        if name in used or BUFFERS.search(name):
            continue
        if header.shared_classifier and _is_head(name):
            left["lm_head (tied to the embedding)"] = 1
        elif family.leaves_out(name) or any(re.search(p, name) for p in NOT_TEXT):
            group = name.split(".")[0] if not name.startswith("model.") else ".".join(name.split(".")[:2])
            left[group] = left.get(group, 0) + 1
        else:
            raise UnsupportedError(
                f"{source.title}: {printable(name)} has no place in the format for family {family.name}; "
                "leaving it out would change the model"
            )
    for group, count in left.items():
        yield f"left out: {printable(group)}, {count} tensor{'s' if count > 1 else ''}"


def _stored_blocks(source: Source, plans: list[TensorPlan], options: Options) -> Iterator[str]:
    """What becomes of matrices that are quantized already: copied, or quantized anew by type."""
    quantized = [p for p in plans if p.spec.is_quantized]
    anew: dict[str, int] = {}
    for plan in quantized:
        dtype = source.dtype(plan.source)
        if not plan.copied and dtype not in _FLOATS:
            anew[dtype] = anew.get(dtype, 0) + 1
    copied = sum(p.copied for p in quantized)
    if copied:
        yield f"copied block by block, without loss: {copied} of {len(quantized)} matrices"
    if anew:
        yield f"quantized anew, with some loss: {', '.join(f'{n} from {dtype}' for dtype, n in anew.items())}"
    if options.imatrix is not None and any(p.copied and p.spec.encoding == "q4_0" for p in quantized):
        yield "the importance matrix does not act on matrices that are copied"
