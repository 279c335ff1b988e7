"""``mlb pack-embed``."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from krafla_cli.embed.pack import Packed


def _widths(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,5}(,[0-9]{1,5})*", value):
        raise click.BadParameter("must be widths such as 64,128,256")
    return tuple(int(part) for part in value.split(","))


def _version(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,5})", value)
    numbers = tuple(int(part) for part in found.groups()) if found else ()
    if len(numbers) != 3 or numbers[0] > 255 or numbers[1] > 255 or numbers[2] > 65535:
        raise click.BadParameter("must be MAJOR.MINOR.PATCH, at most 255.255.65535")
    return numbers


@click.command("pack-embed")
@click.argument("source", metavar="SRC", type=FILE_PATH)
@click.option("-o", "--output", required=True, type=FILE_PATH, help="The model to write (.bin).")
@click.option(
    "--embedding-quant",
    type=click.Choice(["fp32", "int8", "int4", "ternary"]),
    default="int4",
    show_default=True,
    help="Encoding of the embedding table.",
)
@click.option(
    "--weight-quant",
    type=click.Choice(["ternary", "fp32"]),
    default="ternary",
    show_default=True,
    help="Encoding of the layers' matrices.",
)
@click.option("--matryoshka", callback=_widths, metavar="64,128,256", help="Widths that embeddings may be cut to.")
@click.option("--max-seq-len", type=click.IntRange(1, 65535), help="Tokens kept of a text [default: the config's].")
@click.option("--lower-case/--cased", default=None, help="Lower-case texts or not [default: as the tokenizer].")
@click.option("--strip-accents/--keep-accents", default=None, help="Drop accents or not [default: as the tokenizer].")
@click.option("--license-id", type=click.IntRange(1, 0xFFFFFFFF), help="Whose copy this is [default: unlicensed].")
@click.option("--registry", type=FILE_PATH, help="Fingerprint with the key that the license has here.")
@click.option("--fingerprint-key", type=FILE_PATH, help="Fingerprint with the key in this file.")
@click.option("--model-id", help="Name in the header, at most 16 bytes [default: the folder's name].")
@click.option("--model-version", callback=_version, default="1.0.0", show_default=True, help="Version in the header.")
@click.option("--metadata", type=FILE_PATH, help="JSON file to store as the model's metadata.")
@force_option
@json_option
@common_options
def command(source: Path, output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Pack a trained student into a LEMB embedding model.

    SRC is a folder with config.json, weights (*.safetensors or a torch checkpoint) and tokenizer.json (WordPiece) or
    vocab.txt; or a torch checkpoint that holds its config, with the vocabulary beside it.

    \b
    mlb pack-embed ./student -o model.bin --matryoshka 64,128,256
    mlb pack-embed ./student -o customer.bin --license-id 7 --registry keys.jsonl
    """
    from krafla_cli.embed.pack import PackOptions, pack
    from krafla_cli.formats import lemb
    from krafla_cli.formats.atomic import check_target

    progress = TerminalProgress()
    registry, key_file, metadata_file = (options.pop(k) for k in ("registry", "fingerprint_key", "metadata"))
    beside = tuple(path for path in (registry, key_file, metadata_file) if path is not None)
    check_target(output, force, beside)
    key = _fingerprint_key(registry, key_file, options["license_id"], progress)
    metadata = _read(metadata_file)
    version = options.pop("model_version")
    license_id = options.pop("license_id") or 0
    packed = pack(
        source,
        PackOptions(version=version, license_id=license_id, fingerprint_key=key, metadata=metadata, **options),
        progress,
    )
    lemb.write(output, packed.model, force, (*packed.inputs, *beside))
    document = lemb.describe(output)
    if as_json:
        print_json({"path": str(output), **document, "embedding_error": _errors(packed)})
    else:
        _tell(output, document, packed)


def _fingerprint_key(
    registry: Path | None, key_file: Path | None, license_id: int | None, progress: TerminalProgress
) -> bytes | None:
    """The key that the options point to; None without a fingerprint."""
    from krafla_cli.embed.registry import key_of_license, read_key_file

    if registry is not None and key_file is not None:
        raise click.UsageError("give --registry or --fingerprint-key, not both")
    if (registry is not None or key_file is not None) and license_id is None:
        raise click.UsageError("a fingerprint needs --license-id")
    if key_file is not None:
        return read_key_file(key_file, progress)
    if registry is not None and license_id is not None:
        return key_of_license(registry, license_id, progress)
    if license_id:
        progress.warn("the license id is written without a fingerprint: --registry or --fingerprint-key gives it one")
    return None


def _read(path: Path | None) -> bytes | None:
    """The metadata file's bytes, after a look at what they are, so that an error can name the file.

    Other programs read them: no NaN, and no byte order mark, which JSON between programs must not have (RFC 8259).
    """
    if path is None:
        return None
    from krafla_cli.formats.json_file import read_json_object

    read_json_object(path, strict=True)
    return path.read_bytes().removeprefix(codecs.BOM_UTF8)


def _errors(packed: Packed) -> dict[str, float | None]:
    return {"relative": packed.embedding_error, "relative_with_half_mean_threshold": packed.half_mean_error}


def _tell(output: Path, document: dict[str, Any], packed: Packed) -> None:
    from krafla_cli.formats.text import human_bytes, printable

    header = document["header"]
    fingerprint = f", fingerprint of license {header['license_id']}" if header["has_fingerprint"] else ""
    note(
        f"{printable(str(output))}: {printable(header['model_id'])} {header['model_version']}, {header['kind']}, "
        f"{human_bytes(document['n_bytes'])}{fingerprint}"
    )
    if packed.half_mean_error is not None:
        note(
            f"embedding table: relative error {packed.embedding_error:.4f} "
            f"({packed.half_mean_error:.4f} with the threshold 0.5 x mean |w|)"
        )
    elif packed.embedding_error:
        note(f"embedding table: relative error {packed.embedding_error:.4f}")
