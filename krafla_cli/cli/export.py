"""``mlb export``."""

from __future__ import annotations

from pathlib import Path

import click

from krafla_cli.cli.common import FILE_PATH, TerminalProgress, common_options, force_option, json_option, print_json


@click.command("export")
@click.argument("model", type=FILE_PATH)
@click.option("--to", type=click.Choice(["gguf", "safetensors", "mllm"]), required=True, help="The format to write.")
@click.option("-o", "--output", type=FILE_PATH, help="[default: <MODEL>.gguf, <MODEL>.mllm, folder <MODEL>-hf]")
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Of safetensors [default: f32, which is exact].")
@click.option("--tokenizer", type=FILE_PATH, help="A .mlt or tokenizer.json [default: beside MODEL].")
@force_option
@json_option
@common_options
def command(
    model: Path,
    to: str,
    output: Path | None,
    dtype: str | None,
    tokenizer: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a .mlb model in another format, with its tokenizer and chat template.

    \b
    mlb export model.mlb --to gguf                a file that llama.cpp runs; blocks bit for bit
    mlb export model.mlb --to safetensors         a Hugging Face folder that transformers loads
    mlb export model.mlb --to mllm                an MLLM file of version 2
    """
    from krafla_cli.export.pipeline import export
    from krafla_cli.formats.text import human_bytes, printable

    result = export(model, to, output, dtype=dtype, tokenizer=tokenizer, force=force, progress=TerminalProgress())
    if as_json:
        files = [str(path) for path in result.files]
        print_json({"output": str(result.output), "files": files, "bytes": result.n_bytes})
    else:
        click.echo(f"wrote {printable(str(result.output))}: {human_bytes(result.n_bytes)}")
