"""``mlb inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from krafla_cli.cli.common import common_options, json_option, print_json


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--tensors", is_flag=True, help="List every tensor with its place in the file.")
@click.option("--ctx", type=click.IntRange(1), help="Context for which memory is computed [default: 4096 or less].")
@json_option
@common_options
def command(file: Path, tensors: bool, ctx: int | None, as_json: bool) -> None:
    """Show what is in a file: header fields and their meaning, sizes, tensors. The format is told by its magic.

    \b
    mlb inspect model.mlb --tensors    every tensor and its offset
    mlb inspect model.mlt --json       one JSON document
    """
    from krafla_cli.report.inspect import describe, render

    document = describe(file, ctx, tensors)
    if as_json:
        print_json(document)
    else:
        click.echo("\n".join(render(document)))
