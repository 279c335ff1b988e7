"""Small pictures as inline SVG: size map, histogram, heat map. Colours come from the page's style, so that they suit
light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from krafla_cli.formats.text import human_bytes, printable


def text(value: object) -> str:
    """``value`` safe inside a page: escaped for HTML and for the terminal of whoever reads the source."""
    return escape(printable(str(value)))


@dataclass(frozen=True)
class Tile:
    """A part of a size map: ``label``, bytes, and the parts that it is made of."""

    label: str
    n_bytes: int
    parts: tuple[Tile, ...] = ()


@dataclass(frozen=True)
class Box:
    """A rectangle of a picture."""

    x: float
    y: float
    width: float
    height: float


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """Boxes of the given sizes that fill ``box``, as near to squares as rows of them can be.

    ``sizes`` descending and > 0. Source: Bruls, Huizing, van Wijk, "Squarified Treemaps" (2000).
    """
    boxes: list[Box] = []
    scale = box.width * box.height / sum(sizes) if sizes else 0.0
    areas = [s * scale for s in sizes]
    while areas:
        side = min(box.width, box.height)
        n = 1
        while n < len(areas) and _worst(areas[: n + 1], side) <= _worst(areas[:n], side):
            n += 1
        row, areas = areas[:n], areas[n:]
        placed, box = _row(row, box)
        boxes += placed
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    """The worst aspect ratio in a row of boxes along a side."""
    total = sum(row)
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row)))


def _row(areas: Sequence[float], box: Box) -> tuple[list[Box], Box]:
    """A row of boxes along the shorter side of ``box``, and what is left of it."""
    thickness = sum(areas) / min(box.width, box.height)
    placed, at = [], 0.0
    for area in areas:
        length = area / thickness
        if box.width >= box.height:
            placed.append(Box(box.x, box.y + at, thickness, length))
        else:
            placed.append(Box(box.x + at, box.y, length, thickness))
        at += length
    if box.width >= box.height:
        return placed, Box(box.x + thickness, box.y, box.width - thickness, box.height)
    return placed, Box(box.x, box.y + thickness, box.width, box.height - thickness)


def size_map(tiles: Sequence[Tile], width: int = 960, height: int = 420) -> str:
    """A map whose areas are bytes: a box for each tile, divided into its parts; names and sizes on pointing at them."""
    ordered = sorted((t for t in tiles if t.n_bytes), key=lambda t: -t.n_bytes)
    shapes = []
    for i, (tile, box) in enumerate(
        zip(ordered, squarified([t.n_bytes for t in ordered], Box(0, 0, width, height)), strict=True)
    ):
        parts = sorted((p for p in tile.parts if p.n_bytes), key=lambda p: -p.n_bytes) or [tile]
        cells = squarified([p.n_bytes for p in parts], box)
        shapes += [
            f'<rect class="c{i % 8}" x="{c.x:.1f}" y="{c.y:.1f}" width="{c.width:.1f}" height="{c.height:.1f}">'
            f"<title>{text(p.label)}: {human_bytes(p.n_bytes)}</title></rect>"
            for p, c in zip(parts, cells, strict=True)
        ]
        if box.width > 8 * len(tile.label) + 12 and box.height > 24:
            shapes.append(f'<text class="tile" x="{box.x + 6:.1f}" y="{box.y + 18:.1f}">{text(tile.label)}</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="size map">{"".join(shapes)}</svg>'


def histogram(counts: Sequence[int], low: float, step: float, label: str, width: int = 460, height: int = 170) -> str:
    """Bars of ``counts``; bar i stands for values from ``low`` + i x ``step``."""
    most = max([*counts, 1])
    bar = (width - 20) / max(len(counts), 1)
    bars = "".join(
        f'<rect class="bar" x="{10 + i * bar:.1f}" y="{height - 30 - 110 * n / most:.1f}" width="{bar - 1:.1f}" '
        f'height="{110 * n / most:.1f}"><title>{low + i * step:g} to {low + (i + 1) * step:g}: {n:,}</title></rect>'
        for i, n in enumerate(counts)
    )
    axis = (
        f'<text x="10" y="{height - 12}">{low:g}</text>'
        f'<text class="end" x="{width - 10}" y="{height - 12}">{low + len(counts) * step:g}</text>'
    )
    title = f'<text class="head" x="10" y="14">{text(label)}</text>'
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{text(label)}">{title}{bars}{axis}</svg>'


def heat_table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[float | None]]], digits: str = ".4f") -> str:
    """A table whose cells are shaded from the smallest value to the largest."""
    values = [v for _, row in rows for v in row if v is not None]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    head = "".join(f"<th>{text(c)}</th>" for c in ("", *columns))
    body = "".join(
        f"<tr><th>{text(name)}</th>{''.join(_heat_cell(v, low, high, digits) for v in row)}</tr>" for name, row in rows
    )
    return f'<div class="scroll"><table class="heat"><tr>{head}</tr>{body}</table></div>'


def _heat_cell(value: float | None, low: float, high: float, digits: str) -> str:
    if value is None:
        return "<td></td>"
    share = (value - low) / (high - low) if high > low else 0.0
    return f'<td style="--heat:{100 * share:.0f}%">{value:{digits}}</td>'
