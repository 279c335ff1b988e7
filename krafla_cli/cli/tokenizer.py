"""`mlb tokenizer`: tokenizer.json -> .mlt, and a look at the tokens of either."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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
from krafla_cli.errors import UsageError


@click.command("tokenizer")
@click.argument("src", type=FILE_PATH)
@click.option("--output", "-o", type=FILE_PATH, help="The .mlt to write [default: <name of SRC>.mlt].")
@click.option("--encode", "text", metavar="TEXT|-", help="Print the tokens of TEXT (- reads stdin) instead.")
@click.option("--decode", "ids", metavar="IDS", help="Print the text of token ids (1,5,7 or 1 5 7) instead.")
@click.option("--dump", is_flag=True, help="Print every token with its id instead.")
@click.option("--no-bos", is_flag=True, help="With --encode: leave out the BOS that the tokenizer puts first.")
@force_option
@json_option
@common_options
def command(
    src: Path,
    output: Path | None,
    text: str | None,
    ids: str | None,
    dump: bool,
    no_bos: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Convert SRC (a tokenizer.json, or the folder that holds it) to a .mlt, or look at the tokens of SRC.

    \b
    mlb tokenizer ./Qwen3-0.6B -o qwen3.mlt       convert; proven equal on built-in text, else refused
    mlb tokenizer qwen3.mlt --encode "Hello"      ids and pieces of a text
    mlb tokenizer qwen3.mlt --decode 9707,11      the text of ids
    mlb tokenizer qwen3.mlt --dump                all tokens
    """
    n_modes = (text is not None) + (ids is not None) + dump
    if n_modes > 1 or (n_modes and output is not None):
        raise UsageError("--encode, --decode, --dump and -o exclude each other")
    if no_bos and text is None:
        raise UsageError("--no-bos goes with --encode")
    if text is not None:
        _encode(src, text, not no_bos, as_json)
    elif ids is not None:
        _decode(src, ids, as_json)
    elif dump:
        _dump(src, as_json)
    else:
        _convert(src, output, force, as_json)


def _convert(src: Path, output: Path | None, force: bool, as_json: bool) -> None:
    from krafla_cli.formats import atomic, mlt
    from krafla_cli.formats.text import counted, printable
    from krafla_cli.tokenizer.convert import convert_with_proof
    from krafla_cli.tokenizer.inspect import summary
    from krafla_cli.tokenizer.source import tokenizer_path

    path = tokenizer_path(src)
    target = output or Path(f"{(src if src.is_dir() else src.parent).resolve().name or 'tokenizer'}.mlt")
    atomic.check_target(target, force, (path,))
    conversion = convert_with_proof(path)
    data = mlt.to_bytes(conversion.mlt)
    atomic.write_bytes(target, data, force, (path,))
    progress = TerminalProgress()
    for warning in conversion.warnings:
        progress.warn(warning)
    report: dict[str, Any] = {
        "output": str(target),
        "bytes": len(data),
        **summary(conversion.mlt),
        "proven_lines": conversion.n_lines,
        "warnings": list(conversion.warnings),
    }
    if as_json:
        print_json(report)
        return
    flags = ", ".join(report["flag_names"]) or "none"
    note(f"{printable(str(target))}: {report['kind']}, flags {report['flags']} ({flags})")
    tokens, merges = counted(report["n_vocab"], "token"), counted(report["n_merges"], "merge")
    note(f"  {tokens} ({report['n_added']} added), {merges}")
    note(f"  BOS {report['bos']}, EOS {report['eos']}")
    note(f"  proven: the same ids as the tokenizers library gives, on {conversion.n_lines} lines of text")


def _encode(src: Path, text: str, with_bos: bool, as_json: bool) -> None:
    from krafla_cli.formats.text import counted
    from krafla_cli.tokenizer.inspect import encoded, token_rows
    from krafla_cli.tokenizer.load import load_tokenizer

    tokenizer = load_tokenizer(src)
    content = sys.stdin.buffer.read() if text == "-" else text
    ids = encoded(tokenizer, content, with_bos)
    rows = token_rows(tokenizer, ids)
    if as_json:
        print_json({"ids": ids, "tokens": rows})
        return
    _print_rows(rows)
    note(counted(len(ids), "token"))


def _decode(src: Path, ids: str, as_json: bool) -> None:
    from krafla_cli.formats.text import terminal_text
    from krafla_cli.tokenizer.ids import parse_ids
    from krafla_cli.tokenizer.inspect import check_ids, token_rows
    from krafla_cli.tokenizer.load import load_tokenizer
    from krafla_cli.tokenizer.stream import decode

    numbers = parse_ids(ids, "--decode")
    tokenizer = load_tokenizer(src)
    check_ids(numbers, tokenizer)
    text = decode(tokenizer, numbers)
    if as_json:
        print_json({"text": text, "ids": numbers, "tokens": token_rows(tokenizer, numbers)})
    else:
        click.echo(terminal_text(text) if sys.stdout.isatty() else text)


def _dump(src: Path, as_json: bool) -> None:
    from krafla_cli.tokenizer.inspect import all_rows
    from krafla_cli.tokenizer.load import load_tokenizer

    rows = all_rows(load_tokenizer(src))
    if as_json:
        print_json({"tokens": rows})
    else:
        _print_rows(rows)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        click.echo(f"{row['id']:>8}  {row['kind']:<8} {row['shown']}")
