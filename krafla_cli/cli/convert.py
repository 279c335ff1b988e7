"""``mlb convert``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from krafla_cli.cli.common import (
    FILE_PATH,
    TerminalProgress,
    common_options,
    force_option,
    json_option,
    print_json,
    threads_option,
    verbosity,
)

if TYPE_CHECKING:
    from krafla_cli.convert.mix import ClassChoice
    from krafla_cli.convert.pipeline import Result
    from krafla_cli.formats.mlb import TensorSpec


@click.command("convert")
@click.argument("src", type=FILE_PATH)
@click.option("-o", "--output", type=FILE_PATH, help="The .mlb file [default: <SRC>-<wtype>.mlb here].")
@click.option(
    "--wtype",
    type=click.Choice(["q8", "q4"]),
    help="Weights as Q8_0 or Q4_0 [default: q4; matrices that a GGUF or MLLM file has in Q8_0 stay so].",
)
@click.option(
    "--scales", type=click.Choice(["f16", "f32"]), default="f16", show_default=True, help="Type of the scales."
)
@click.option(
    "--q4-rule",
    type=click.Choice(["fit", "best", "round"]),
    help="Q4_0 blocks: best fit of 13 candidates, the exact minimum of the same error (about 20 times slower), or "
    "llama.cpp's rounding [default: the family's].",
)
@click.option(
    "--q8-classes",
    metavar="LIST",
    default="none",
    show_default=True,
    help="Matrix classes kept in Q8_0 in a q4 model: none, all, a list of tok_emb,wcls,qk,v,o,gate_up,down, or auto: "
    "those that take most off the measured error within --target-bpw.",
)
@click.option("--target-bpw", type=float, metavar="BITS", help="Bits per weight of the file for auto [default: 5.0].")
@click.option("--imatrix", type=FILE_PATH, help="MLI1 file of `mlb run --imatrix`; weighs channels (fit, best).")
@click.option("--config", type=FILE_PATH, help="Of a .mllm: the folder with config.json and tokenizer.json.")
@click.option("--max-seq", type=click.IntRange(1, 1 << 24), help="Longest context [default: the checkpoint's].")
@click.option("--dry-run", is_flag=True, help="Write nothing; show what would be written, sizes, bits per weight.")
@threads_option()
@force_option
@json_option
@common_options
def command(
    src: Path,
    output: Path | None,
    wtype: str | None,
    scales: str,
    q4_rule: str | None,
    q8_classes: str,
    target_bpw: float | None,
    imatrix: Path | None,
    config: Path | None,
    max_seq: int | None,
    dry_run: bool,
    threads: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint (Hugging Face folder, .gguf, .mllm) to a .mlb model, with its tokenizer and settings.

    \b
    mlb convert ./Qwen3-0.6B --wtype q4            writes Qwen3-0.6B-q4.mlb, .mlt and .json
    mlb convert ./Qwen3-0.6B --wtype q8 --dry-run  shows sizes and bits per weight, writes nothing
    mlb convert ./Qwen3-0.6B --q8-classes auto --target-bpw 5.5 --imatrix imat.mli
    mlb convert model.Q4_0.gguf                    copies Q4_0 and Q8_0 blocks without loss
    """
    from krafla_cli.convert.pipeline import convert
    from krafla_cli.convert.plan import Options

    is_auto = q8_classes == "auto"
    if target_bpw is not None and not is_auto:
        raise click.UsageError("--target-bpw is for --q8-classes auto")
    options = Options(
        wtype,
        scales,
        q4_rule,
        0 if is_auto else _q8_mask(q8_classes),
        max_seq,
        str(imatrix) if imatrix is not None else None,
        (5.0 if target_bpw is None else target_bpw) if is_auto else None,
    )
    result = convert(
        src,
        output,
        config=config,
        options=options,
        threads=threads,
        force=force,
        dry_run=dry_run,
        measure=as_json or verbosity().verbose,
        progress=TerminalProgress(),
    )
    if as_json:
        print_json(_document(result, dry_run))
    else:
        _print(result, dry_run)


def _q8_mask(names: str) -> int:
    """The q8_mask of a list of class names. Raises UsageError naming a wrong one."""
    from krafla_cli.errors import UsageError
    from krafla_cli.formats.mlb import Q8_CLASSES
    from krafla_cli.formats.text import printable

    if names in ("none", "all"):
        return 0 if names == "none" else sum(Q8_CLASSES.values())
    mask = 0
    for name in names.split(","):
        if name.strip() not in Q8_CLASSES:
            raise UsageError(
                f'--q8-classes: no class "{printable(name.strip())}"; there are '
                f"{', '.join(Q8_CLASSES)}, none, all, auto"
            )
        mask |= Q8_CLASSES[name.strip()]
    return mask


def _document(result: Result, dry_run: bool) -> dict[str, Any]:
    from krafla_cli.convert.pipeline import class_encodings, header_summary

    return {
        "output": str(result.output),
        "sidecars": [str(p) for p in result.sidecars],
        "dry_run": dry_run,
        "family": result.plan.family.name,
        "bytes": result.n_bytes,
        "weights": result.n_weights,
        "bits_per_weight": result.bits_per_weight,
        "q4_rule": result.q4_rule if result.options.wtype == "q4" else None,
        "encodings": dict(class_encodings(result.plan)),
        "mix": [_choice(c) for c in result.mix.classes] if result.mix else None,
        "tokenizer": result.tokenizer.suffix.lstrip(".") if result.tokenizer else None,
        "tokenizer_reason": result.tokenizer.reason if result.tokenizer else None,
        "remarks": result.plan.remarks,
        "copied_matrices": sum(t.copied for t in result.plan.tensors),
        "requantized_blocks": sum(result.requantized.values()),
        "tensors": [_tensor(result, plan.spec) for plan in result.plan.tensors],
        "header": header_summary(result.plan.header),
        "sha256": result.sha256,
        "seconds": result.seconds,
        "fsync_seconds": result.fsync_seconds,
    }


def _choice(choice: ClassChoice) -> dict[str, Any]:
    """One class of matrices: what Q8_0 costs and gains, and whether it was chosen."""
    return {**asdict(choice), "benefit_per_megabyte": choice.benefit_per_megabyte}


def _tensor(result: Result, spec: TensorSpec) -> dict[str, Any]:
    """One tensor: its type, bits per weight, and error (None where it is exact, or nothing was written)."""
    errors = result.errors.get(spec.name)
    return {
        "name": spec.name,
        "encoding": spec.encoding,
        "shape": list(spec.shape),
        "bits_per_weight": 8 * spec.total_bytes / spec.n_weights,
        "relative_error": errors.relative if errors else None,
    }


def _print(result: Result, dry_run: bool) -> None:
    from krafla_cli.formats.text import human_bytes, printable
    from krafla_cli.report.tables import table

    if verbosity().quiet:
        return
    if verbosity().verbose:
        rows = [list(_tensor(result, plan.spec).values()) for plan in result.plan.tensors]
        click.echo("\n".join(table(("tensor", "type", "shape", "bits per weight", "relative error"), rows)))
    if result.mix:
        names = ("class", "bytes more", "error in q4", "in q8", "benefit per MB", "Q8_0")
        rows = [
            [c.name, f"{c.extra_bytes:,}", c.error_q4, c.error_q8, c.benefit_per_megabyte, "yes" if c.chosen else ""]
            for c in result.mix.classes
        ]
        click.echo("\n".join(table(names, rows)))
    size, bits = human_bytes(result.n_bytes), result.bits_per_weight
    verb = "would write" if dry_run else "wrote"
    click.echo(
        f"{verb} {printable(str(result.output))}: {size}, {result.n_weights:,} weights, {bits:.2f} bits per weight"
    )
    for path in result.sidecars:
        click.echo(f"{verb} {printable(str(path))}")
