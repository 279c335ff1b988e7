"""``mlb inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from krafla_cli.cli.common import (
    FILE_PATH,
    TerminalProgress,
    common_options,
    force_option,
    json_option,
    note,
    print_json,
)

if TYPE_CHECKING:
    from krafla_cli.formats.mlb_file import MlbFile


@click.command("inspect")
@click.argument("file", type=FILE_PATH)
@click.option("--tensors", is_flag=True, help="List every tensor with its place in the file.")
@click.option("--ctx", type=click.IntRange(1), help="Context for which memory is computed [default: 4096 or less].")
@click.option("--report", type=FILE_PATH, help="Write a page with pictures instead (.mlb models).")
@click.option("--plot", type=FILE_PATH, help="Write a picture instead (.mlb models; the plot extra).")
@click.option("--against", type=FILE_PATH, help="Checkpoint folder, for the page's errors.")
@click.option("--imatrix", type=FILE_PATH, help="MLI1 file for the page's importance per layer.")
@force_option
@json_option
@common_options
def command(
    file: Path,
    tensors: bool,
    ctx: int | None,
    report: Path | None,
    plot: Path | None,
    against: Path | None,
    imatrix: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Show what is in a file: header fields and their meaning, sizes, tensors. The format is told by its magic.

    \b
    mlb inspect model.mlb --tensors                             every tensor and its offset
    mlb inspect model.mlt --json                                one JSON document
    mlb inspect model.mlb --report m.html --against ./Qwen3-0.6B    a page with pictures and errors
    """
    from krafla_cli.errors import UsageError

    if (against or imatrix) and not report:
        raise UsageError("--against and --imatrix add to the page of --report FILE")
    if report or plot:
        _write_pictures(file, ctx, report, plot, against, imatrix, force)
        return
    from krafla_cli.report.inspect import describe, render

    document = describe(file, ctx, tensors)
    if as_json:
        print_json(document)
    else:
        click.echo("\n".join(render(document)))


def _write_pictures(
    file: Path,
    ctx: int | None,
    report: Path | None,
    plot: Path | None,
    against: Path | None,
    imatrix: Path | None,
    force: bool,
) -> None:
    from krafla_cli.formats.atomic import check_target, write_bytes
    from krafla_cli.formats.mlb_file import open_mlb
    from krafla_cli.formats.text import printable

    inputs = tuple(p for p in (file, imatrix) if p is not None)
    for target in filter(None, (report, plot)):
        check_target(target, force, inputs)
    model = open_mlb(file, scan=False)
    if report:
        page = _page(model, ctx, against, imatrix)
        write_bytes(report, page.encode(), force, inputs)
        note(f"wrote {printable(str(report))}")
    if plot:
        from krafla_cli.report.plot import figure

        write_bytes(plot, figure(model, plot.suffix), force, inputs)
        note(f"wrote {printable(str(plot))}")


def _page(model: MlbFile, ctx: int | None, against: Path | None, imatrix: Path | None) -> str:
    from krafla_cli.report.page import page

    errors = importance = None
    if against:
        from krafla_cli.convert.compare import errors_against

        errors = errors_against(model, against, TerminalProgress())
    if imatrix:
        from krafla_cli.formats import mli

        importance = mli.read(imatrix)
    return page(model, ctx, errors, importance)
