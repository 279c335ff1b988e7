"""``mlb fingerprint``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from krafla_cli.cli.common import (
    FILE_PATH,
    TerminalProgress,
    common_options,
    json_option,
    note,
    print_json,
    threads_option,
)

if TYPE_CHECKING:
    from krafla_cli.embed.fingerprint import Detection

_REGISTRY = click.option("--registry", required=True, type=FILE_PATH, help="JSON lines with the licenses' secret keys.")


@click.group("fingerprint")
def command() -> None:
    """Mark the copies of a LEMB model that customers get, and find out whose copy a model is.

    \b
    mlb fingerprint new-key --registry keys.jsonl --license-id 7 --customer "Acme"
    mlb pack-embed ./student -o acme.bin --license-id 7 --registry keys.jsonl
    mlb fingerprint detect suspect.bin --reference model.bin --registry keys.jsonl
    """


@command.command("new-key")
@_REGISTRY
@click.option("--license-id", required=True, type=click.IntRange(1, 0xFFFFFFFF), help="The new license.")
@click.option("--customer", required=True, help="Whose it is.")
@json_option
@common_options
def new_key(registry: Path, license_id: int, customer: str, as_json: bool) -> None:
    """Make a secret key for a license and add it to the registry (mode 600). The key is never shown."""
    from krafla_cli.embed.registry import add_license
    from krafla_cli.formats.text import printable

    added = add_license(registry, license_id, customer)
    if as_json:
        print_json({"registry": str(registry), "license_id": added.license_id, "customer": added.customer})
    else:
        note(f"{printable(str(registry))}: license {added.license_id} for {printable(added.customer)}")


@command.command("detect")
@click.argument("suspect", type=FILE_PATH)
@click.option("--reference", required=True, type=FILE_PATH, help="The model without a fingerprint.")
@_REGISTRY
@threads_option()
@json_option
@common_options
def detect(suspect: Path, reference: Path, registry: Path, threads: int | None, as_json: bool) -> None:
    """Find out whose fingerprint a model has, if any; exit code 0 either way.

    A score is the distance between the suspect's embeddings of fixed texts and the reference's, rotated for a license:
    0 is equal, 1.4 unrelated; the margin is to the next best score. Evidence is in standard deviations of what a
    license without a part in the suspect gives; a match has 6 or more.
    """
    from krafla_cli.embed.threads import limit_library_threads

    n_threads = limit_library_threads(threads)
    from krafla_cli.embed import fingerprint
    from krafla_cli.embed.embedder import open_embedder
    from krafla_cli.embed.registry import read_registry

    progress = TerminalProgress()
    licenses = read_registry(registry, progress)
    found = fingerprint.detect(
        open_embedder(suspect, n_threads, progress), open_embedder(reference, n_threads), licenses, progress
    )
    if as_json:
        print_json(_document(found))
    else:
        click.echo("\n".join(_lines(found)))


def _document(found: Detection) -> dict[str, Any]:
    match = found.match
    return {
        "match": {"license_id": match.license_id, "customer": match.customer} if match else None,
        "margin": found.margin,
        "unmarked_score": found.unmarked,
        "procrustes_score": found.procrustes,
        "n_probes": found.n_probes,
        "scores": [
            {
                "license_id": s.license.license_id,
                "score": s.total,
                "dims": list(s.dims),
                "block_scores": list(s.blocks),
                "evidence": s.evidence,
            }
            for s in found.scores
        ],
    }


def _lines(found: Detection) -> list[str]:
    from krafla_cli.formats.text import printable

    lines = [] if found.match else ["no match"]
    if found.scores:
        best, margin = found.scores[0], found.margin or 0.0
        lines.append(
            f"{'match' if found.match else 'nearest'}: license {best.license.license_id} "
            f"({printable(best.license.customer)}), score {best.total:.4f}, margin {margin:+.4f}, "
            f"evidence {best.evidence:.1f}"
        )
    return [*lines, f"score without a rotation {found.unmarked:.4f}, with the best one {found.procrustes:.4f}"]
