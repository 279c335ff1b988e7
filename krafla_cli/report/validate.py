"""Validating files and folders of every known format, with what lies beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from krafla_cli.errors import FileError, FormatError
from krafla_cli.formats import detect, index_folder, mlt
from krafla_cli.formats.cursor import map_file
from krafla_cli.formats.faults import FORMAT, IO, Report
from krafla_cli.formats.mlb_file import open_mlb
from krafla_cli.formats.sidecar import Sidecar, file_sha256, read_sidecar, sidecar_path

SUFFIXES = frozenset({".mlb", ".mlt", ".mli", ".bin", ".mllm", ".gguf"})


def validate(path: str | os.PathLike[str], strict: bool = False) -> Report:
    """The report of one file, or of an index's folder; of a model, also of its settings and its tokenizer's size.

    ``strict``: what a loader overlooks (NaN in norms and scales, rows of zeros, padding that is not zero, bytes after
    the end, fields without a meaning) is a fault as well, and not a warning.

    >>> krafla_cli.validate("demo.mlb").valid
    True
    """
    report = index_folder.validate(path) if index_folder.is_index(path) else detect.validate(path)
    if report.kind == "mlb" and report.valid:
        vocab = open_mlb(path, scan=False).header.vocab
        _check_sidecar(Path(path), vocab, report)
        _check_tokenizer(Path(path).with_suffix(".mlt"), vocab, report)
    return report.strict() if strict else report


def _check_sidecar(model: Path, vocab: int, report: Report) -> None:
    path = sidecar_path(model)
    if not path.is_file():
        return
    try:
        sidecar = read_sidecar(path)
        actual = file_sha256(model)
        if sidecar.sha256 != actual:
            text = f"SHA-256 in {path.name} is {sidecar.sha256[:16]}…, the model's is {actual[:16]}…"
            report.fault(FORMAT, "sidecar", None, text)
        _check_template(sidecar)
    except FileError as error:
        report.fault(IO, "sidecar", None, str(error))
    except FormatError as error:
        report.fault(FORMAT, "sidecar", None, str(error))
    else:
        beyond = [i for i in sidecar.stop_ids if not 0 <= i < vocab]
        if beyond:
            report.warn("sidecar", None, f"stop_ids: {beyond[0]} is no id of the model, which has {vocab}")


def _check_template(sidecar: Sidecar) -> None:
    """Raises FormatError where the chat template does not compile; it is not run."""
    if sidecar.chat_template is not None:
        from krafla_cli.tokenizer.chat import ChatTemplate

        ChatTemplate(sidecar.chat_template)


def _check_tokenizer(path: Path, vocab: int, report: Report) -> None:
    """Whether the .mlt beside a model fits it; its own faults are those of its own report."""
    if not path.is_file():
        return
    head = map_file(path)[: mlt.LAYOUT.n_bytes]
    n_vocab = int(mlt.LAYOUT["n_vocab"].unpack(head)) if len(head) == mlt.LAYOUT.n_bytes else 0
    if head[:4] == mlt.MAGIC and n_vocab > vocab:
        report.warn("tokenizer", None, f"{path.name} has {n_vocab} tokens, more than the model's {vocab}")


def expand(paths: tuple[Path, ...]) -> Iterator[Path]:
    """What to check: each path, and for a folder every file below it named like a known format, and every index."""
    for path in paths:
        if path.is_dir() and not index_folder.is_index(path):
            yield from sorted(p for p in path.rglob("*") if _is_known(p))
        else:
            yield path


def _is_known(path: Path) -> bool:
    return index_folder.is_index(path) or (path.suffix in SUFFIXES and path.is_file())
