"""``mlb imatrix``."""

from __future__ import annotations

from pathlib import Path

import click

from krafla_cli.cli.common import FILE_PATH, common_options, force_option, json_option, note, print_json


@click.group("imatrix")
def command() -> None:
    """Add up importance matrices (MLI1), or see which layers and channels matter.

    \b
    mlb imatrix merge a.mli b.mli -o all.mli    sums of several machines or texts
    mlb imatrix show all.mli --top 5            the largest channels of each input
    """


@command.command("merge")
@click.argument("files", nargs=-1, required=True, type=FILE_PATH)
@click.option("-o", "--output", required=True, type=FILE_PATH, help="The MLI1 file to write.")
@force_option
@json_option
@common_options
def merge(files: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Add up importance matrices of one model: sums and token counts.

    \b
    mlb imatrix merge a.mli b.mli -o all.mli
    mlb imatrix merge monday/*.mli -o week.mli --force
    """
    from krafla_cli.formats.atomic import write_bytes
    from krafla_cli.formats.text import counted, printable
    from krafla_cli.report.imatrix import merged

    total = merged(files)
    write_bytes(output, total.to_bytes(), force, inputs=files)
    if as_json:
        tokens = {"layer_tokens": total.layer_tokens, "classifier_tokens": total.classifier_tokens}
        print_json({"output": str(output), "files": len(files), **tokens})
    else:
        n_files, n_tokens = counted(len(files), "file"), counted(total.layer_tokens, "token")
        note(f"wrote {printable(str(output))}: {n_files}, {n_tokens} in the layers")


@command.command("show")
@click.argument("file", type=FILE_PATH)
@click.option("--top", type=click.IntRange(0, 1000), default=3, show_default=True, help="Channels to name per input.")
@json_option
@common_options
def show(file: Path, top: int, as_json: bool) -> None:
    """Show each input of each layer: tokens, mean square, how uneven its channels are, and the largest ones.

    \b
    mlb imatrix show all.mli
    mlb imatrix show all.mli --top 10 --json
    """
    from krafla_cli.formats.mli import read
    from krafla_cli.report.imatrix import channel_rows
    from krafla_cli.report.tables import table

    rows = channel_rows(read(file), top)
    if as_json:
        print_json({"path": str(file), "inputs": rows})
    else:
        click.echo("\n".join(table(tuple(rows[0]), [list(r.values()) for r in rows])))
