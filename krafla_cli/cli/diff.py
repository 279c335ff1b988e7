"""``mlb diff``."""

from __future__ import annotations

from pathlib import Path

import click

from krafla_cli.cli.common import FILE_PATH, common_options, json_option, print_json


@click.command("diff")
@click.argument("a", type=FILE_PATH)
@click.argument("b", type=FILE_PATH)
@click.option("--most", type=click.IntRange(1), default=40, show_default=True, help="Most rows to show of each table.")
@json_option
@common_options
def command(a: Path, b: Path, most: int, as_json: bool) -> int:
    """Compare two files of one kind: header fields, tensors, tokens that differ, and how much. Exit code 1 if any do.

    \b
    mlb diff q4.mlb q4-imatrix.mlb    tensors that differ, and by how much
    mlb diff old.mlt new.mlt --json   every token and merge that differs
    """
    from krafla_cli.report.diff import diff
    from krafla_cli.report.tables import table

    found = diff(a, b)
    if as_json:
        print_json(found)
        return int(not found["same"])
    if found["same"]:
        click.echo("no difference")
    for title, rows in found["tables"].items():
        click.echo(f"{title}: {len(rows)} differ")
        click.echo("\n".join(table(tuple(rows[0]), [list(r.values()) for r in rows[:most]])))
        if len(rows) > most:
            click.echo(f"... and {len(rows) - most} more")
    return int(not found["same"])
