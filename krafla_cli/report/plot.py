"""``mlb inspect --plot``: sizes by class and block scales of a .mlb model as one picture, drawn by matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from krafla_cli.errors import UnsupportedError, UsageError
from krafla_cli.formats.mlb import MATRIX_CLASS
from krafla_cli.formats.mlb_file import MlbFile
from krafla_cli.report.page import tiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = ("png", "svg", "pdf")


def figure(model: MlbFile, suffix: str) -> bytes:
    """The picture's bytes, in the format of the file name's ``suffix`` (".png", ".svg", ".pdf").

    Raises UsageError for another suffix, UnsupportedError where matplotlib is not installed.
    """
    kind = suffix.lstrip(".").lower()
    if kind not in _FORMATS:
        raise UsageError(f"--plot writes {', '.join(_FORMATS)}, by the ending of the file name; not {suffix!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("--plot needs matplotlib: pip install 'krafla-cli[plot]'") from error
    drawn = Figure(figsize=(10, 4), layout="constrained")
    sizes, scales = drawn.subplots(1, 2)
    _draw_sizes(sizes, model)
    _draw_scales(scales, model)
    return _rendered(drawn, kind)


def _rendered(drawn: Figure, kind: str) -> bytes:
    out = io.BytesIO()
    drawn.savefig(out, format=kind, dpi=150)
    return out.getvalue()


def _draw_sizes(axes: Any, model: MlbFile) -> None:
    ordered = sorted(tiles(model), key=lambda t: t.n_bytes)
    axes.barh([t.label for t in ordered], [t.n_bytes / 1e6 for t in ordered])
    axes.set_xlabel("MB")
    axes.set_title("Bytes by class")


def _draw_scales(axes: Any, model: MlbFile) -> None:
    by_class: dict[str, list[Any]] = {}
    for spec in model.tensors.values():
        if spec.is_quantized:
            scales = np.abs(model.quantized(spec.name).d.astype(np.float32)).reshape(-1)
            by_class.setdefault(MATRIX_CLASS.get(spec.role, spec.role), []).append(scales[scales > 0])
    for name, parts in by_class.items():
        values = np.log2(np.concatenate(parts))
        if len(values):
            axes.hist(values, bins=60, histtype="step", density=True, label=name)
    axes.set_xlabel("log2 of the block scale")
    axes.set_title("Block scales")
    axes.legend()
