"""Which matrix classes of a q4 model are kept in Q8_0: the choice with the least measured error within a size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from krafla_cli.convert.checkpoint import Checkpoint
from krafla_cli.convert.plan import Options, Plan
from krafla_cli.convert.stream import in_work
from krafla_cli.convert.tensors import Quantizer, encoding_of
from krafla_cli.errors import InputError
from krafla_cli.formats.mlb import MATRIX_CLASS, Q8_CLASSES, Header, TensorSpec, tensors
from krafla_cli.progress import Progress
from krafla_cli.quant.q4_0 import Rule

ImportanceOf = Callable[[TensorSpec], "npt.NDArray[np.float32] | None"]


@dataclass(frozen=True)
class ClassChoice:
    """A class of matrices, what Q8_0 costs and gains in it, and whether it was chosen.

    Errors are sums over its matrices of the squared relative error (weighted by importance where there is one): each
    matrix adds noise to the hidden state in that proportion.
    """

    name: str
    extra_bytes: int
    error_q4: float
    error_q8: float
    chosen: bool = False

    @property
    def benefit(self) -> float:
        """What Q8_0 takes off the error."""
        return self.error_q4 - self.error_q8

    @property
    def benefit_per_megabyte(self) -> float:
        """The benefit for each million bytes more; 0 where it costs none (blocks that are kept as they are)."""
        return self.benefit / self.extra_bytes * 1e6 if self.extra_bytes else 0.0


@dataclass(frozen=True)
class Mix:
    """The choice among all subsets of ``classes``: the q8_mask, and the bits per weight of the whole file with it."""

    classes: tuple[ClassChoice, ...]
    q8_mask: int
    bits_per_weight: float


def choose_mix(
    checkpoint: Checkpoint,
    options: Options,
    target_bpw: float,
    rule: Rule,
    importance_of: ImportanceOf,
    n_threads: int,
    progress: Progress,
) -> Mix:
    """The classes whose Q8_0 takes most off the error while the file stays within ``target_bpw`` bits per weight.

    Every matrix is quantized both ways and measured, and every subset of the (at most 7) classes is looked at. Raises
    InputError where not even q4 alone is that small; else as the conversion itself.
    """
    plans = {wtype: checkpoint.plan(replace(options, wtype=wtype, q8_mask=0)) for wtype in ("q4", "q8")}
    header = plans["q4"].header
    least = bits_per_weight(header)
    if least > target_bpw:
        raise InputError(
            f"--target-bpw {target_bpw:g}: with all classes in q4 the model has {least:.4f} bits per weight; "
            f"give at least {np.ceil(100 * least) / 100:g}"
        )
    total = sum(t.spec.total_bytes for plan in plans.values() for t in plan.tensors if t.spec.is_quantized)
    progress.start("measuring", total, "B")
    try:
        errors = {w: _errors(plan, checkpoint, rule, importance_of, n_threads, progress) for w, plan in plans.items()}
    finally:
        progress.finish()
    return _best(header, _costs(plans, errors), target_bpw)


def bits_per_weight(header: Header) -> float:
    """Bits of the whole file, its padding included, for each weight."""
    specs = tensors(header)
    return 8 * (-(-specs[-1].end // 64) * 64) / sum(s.n_weights for s in specs if s.encoding != "u8")


def _errors(
    plan: Plan, checkpoint: Checkpoint, rule: Rule, importance_of: ImportanceOf, n_threads: int, progress: Progress
) -> dict[str, float]:
    """The squared relative error of each matrix of ``plan`` by name; nothing is kept but that."""
    quantizer = Quantizer(bool(plan.header.scale_f16), rule, measure=True)
    matrices = [t for t in plan.tensors if t.spec.is_quantized]
    encodings = (
        # The weights of the errors are those that a Q4_0 matrix is quantized with, in both types.
        encoding_of(t, checkpoint.source, quantizer, importance_of(replace(t.spec, encoding="q4_0")))
        for t in matrices
    )
    found = {}
    with in_work(encodings, n_threads) as works:
        for work in works:
            for _ in work.complete_rows():
                pass
            tensor = work.encoding.plan
            found[tensor.spec.name] = work.errors.relative_weighted**2
            checkpoint.source.release(tensor.source)
            progress.advance(tensor.spec.total_bytes)
    return found


def _costs(plans: dict[str, Plan], errors: dict[str, dict[str, float]]) -> list[ClassChoice]:
    """Each class of the model, in the order of the format's bits."""
    sums: dict[str, ClassChoice] = {}
    for q4, q8 in zip(plans["q4"].tensors, plans["q8"].tensors, strict=True):
        name = MATRIX_CLASS.get(q4.spec.role)
        if name is not None:
            sums[name] = _added(
                sums.get(name, ClassChoice(name, 0, 0.0, 0.0)),
                q8.spec.total_bytes - q4.spec.total_bytes,
                errors["q4"][q4.spec.name],
                errors["q8"][q4.spec.name],
            )
    return [sums[name] for name in Q8_CLASSES if name in sums]


def _added(c: ClassChoice, n_bytes: int, error_q4: float, error_q8: float) -> ClassChoice:
    return ClassChoice(c.name, c.extra_bytes + n_bytes, c.error_q4 + error_q4, c.error_q8 + error_q8)


def _best(header: Header, costs: list[ClassChoice], target_bpw: float) -> Mix:
    """Of the subsets within the target that with the largest benefit; of equal ones the smallest file."""
    found: tuple[float, float, int] | None = None
    for mask in _masks([Q8_CLASSES[c.name] for c in costs]):
        bits = bits_per_weight(replace(header, q8_mask=mask))
        if bits <= target_bpw:
            benefit = sum(c.benefit for c in costs if mask & Q8_CLASSES[c.name])
            if found is None or (benefit, -bits) > found[:2]:
                found = benefit, -bits, mask
    _, minus_bits, best = found or (0.0, -bits_per_weight(header), 0)
    classes = tuple(replace(c, chosen=bool(best & Q8_CLASSES[c.name])) for c in costs)
    return Mix(classes, best, -minus_bits)


def _masks(bits: list[int]) -> Iterator[int]:
    """All sums of some of ``bits``."""
    for subset in range(1 << len(bits)):
        yield sum(bit for i, bit in enumerate(bits) if subset >> i & 1)
