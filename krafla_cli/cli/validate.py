"""``mlb validate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from krafla_cli.cli.common import FILE_PATH, common_options, json_option, print_json, verbosity

if TYPE_CHECKING:
    from krafla_cli.formats.faults import Fault, Report


@click.command("validate")
@click.argument("paths", nargs=-1, required=True, type=FILE_PATH)
@click.option("--strict", is_flag=True, help="Warnings are faults too.")
@json_option
@common_options
def command(paths: tuple[Path, ...], strict: bool, as_json: bool) -> int:
    """Check files of every known format, whole folders too. Made for CI: exit code 1 if any is bad.

    \b
    mlb validate model.mlb model.mlt    a line for each file
    mlb validate ./models --json        every file below the folder, as one JSON document
    mlb validate model.mlb --strict     NaN, rows of zeros, bytes that belong to nothing, ... are faults
    """
    from krafla_cli.errors import InputError
    from krafla_cli.report.validate import expand, validate

    reports = [validate(path, strict) for path in expand(paths)]
    if not reports:
        raise InputError(f"no files of a known format in {', '.join(map(str, paths))}")
    if as_json:
        print_json([_document(r) for r in reports])
    else:
        for report in reports:
            _print(report)
    return 0 if all(r.valid for r in reports) else 1


def _document(report: Report) -> dict[str, Any]:
    return {
        "path": report.path,
        "kind": report.kind,
        "valid": report.valid,
        "status": report.status,
        "faults": [_fault_document(f) for f in report.faults],
        "warnings": [_fault_document(f) for f in report.warnings],
    }


def _fault_document(fault: Fault) -> dict[str, Any]:
    return {"status": fault.status, "where": fault.where, "offset": fault.offset, "message": fault.message}


def _print(report: Report) -> None:
    from krafla_cli.formats.text import printable

    name = printable(report.path)
    if report.valid and not verbosity().quiet:
        click.echo(f"{name}: ok ({report.kind})")
    for fault in report.faults:
        click.echo(f"{name}: {fault.status}: {fault}")
    if not verbosity().quiet:
        for warning in report.warnings:
            click.echo(f"{name}: warning: {warning}")
