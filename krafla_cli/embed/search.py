"""Searching an index: first whether the model is the one that it was built with, then the rows nearest to a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from krafla_cli.errors import FileError, FormatError, InputError
from krafla_cli.formats.index_folder import VECTORS, IndexFolder, Manifest
from krafla_cli.formats.lemb import LembModel, read
from krafla_cli.formats.text import printable
from krafla_cli.kernels import text_operations as ops
from krafla_cli.kernels.native import prepare
from krafla_cli.kernels.team import RUN, Call, Program, Team
from krafla_cli.progress import SILENT, Progress

Float64 = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

_BLOCK = 256  # scores whose largest stands for all of them


@dataclass(frozen=True)
class Hit:
    """A row of the index with its score and text."""

    row: int
    score: float
    text: str


def model_of(index: IndexFolder, path: Path | None = None) -> LembModel:
    """The model in ``path``, or the one that the index was built with. Raises FileError, FormatError, ShapeError."""
    if path is not None:
        return read(path)
    try:
        return read(index.path / index.manifest.model)
    except FileError as error:
        raise FileError(f"{error}; the index was built with it, --model names another place") from error


def check_model(manifest: Manifest, model: LembModel, progress: Progress = SILENT) -> None:
    """Raises InputError, with the message of section 8, where ``model`` is not the one that the index is for.

    That is another model_id, major version, license or fingerprint, or a width that the model does not have; other
    minor and patch versions are the same to an index. Another file of the same version is worth a warning.
    """
    h = model.header
    built, loaded = f"v{'.'.join(map(str, manifest.version[:2]))}", f"v{h.version_major}.{h.version_minor}"
    differences = []
    if manifest.model_id != h.name:
        loaded = f"{printable(h.name)} {loaded}"
    if (manifest.license_id, manifest.has_fingerprint) != (h.license_id, h.has_fingerprint):
        differences.append(
            (_mark(manifest.license_id, manifest.has_fingerprint), _mark(h.license_id, h.has_fingerprint))
        )
    if manifest.dims not in h.dims:
        differences.append((f"{manifest.dims} dimensions", f"dimensions {', '.join(map(str, h.dims))}"))
    same = manifest.model_id == h.name and manifest.version[0] == h.version_major
    if same and not differences:
        if manifest.model_version == h.version and manifest.model_sha256 != model.sha256:
            progress.warn(
                f"the model is {printable(h.name)} {h.version}, but not the file that the index was built with"
            )
        return
    built, loaded = (
        f"{name} ({'; '.join(notes)})" if notes else name
        for name, notes in ((built, [d[0] for d in differences]), (loaded, [d[1] for d in differences]))
    )
    raise InputError(
        f"Index was built with {printable(manifest.model_id)} {built} but the loaded model is {loaded}. "
        "Re-run `mlb index build`."
    )


def _mark(license_id: int, has_fingerprint: bool) -> str:
    return f"license {license_id}, {'with a' if has_fingerprint else 'no'} fingerprint"


class Searcher:
    """An index with threads to search it."""

    def __init__(self, index: IndexFolder, threads: int = 1, progress: Progress = SILENT) -> None:
        self.index = index
        self._team = Team(threads)
        prepare([RUN, ops.SCORE_ROWS], progress)

    def scores(self, query: npt.NDArray[np.floating]) -> Float64:
        """The product of ``query`` [dims] with every row, float64 [count].

        A row of int8 is its codes times its scale, neither it nor the query rounded any further. Products are exact,
        and their sum is float64's. Raises InputError (another length), FormatError (a row that is not finite).
        """
        vectors, wide = self.index.vectors, np.ascontiguousarray(query, np.float64)
        if wide.shape != vectors.shape[1:]:
            raise InputError(f"the query has {wide.size} dimensions, the index {vectors.shape[1]}")
        out = np.empty(len(vectors), np.float64)
        operands = ops.MATCHES.pack(
            rows=vectors,
            is_int8=vectors.dtype.kind == "i",
            scales=self.index.scales,
            query=wide,
            n_rows=len(vectors),
            n_cols=vectors.shape[1],
            scores=out,
        )
        self._team.run(Program([Call(ops.SCORE_ROWS, operands)]), ops.BATCH.pack())
        finite = np.isfinite(out)
        if not finite.all():
            name = printable(str(self.index.path / VECTORS))
            raise FormatError(f"{name}: row {int(np.argmin(finite))} is not finite; build the index again")
        return out

    def search(self, query: npt.NDArray[np.floating], k: int) -> list[Hit]:
        """The ``k`` rows (all, if there are fewer) with the highest scores, best first; of equal ones the first row."""
        scores = self.scores(query)
        return [Hit(int(row), float(scores[row]), self.index.text(int(row))) for row in top_rows(scores, k)]


def top_rows(scores: Float64, k: int) -> Rows:
    """The rows of the ``k`` highest scores, best first, ties by row number. Sorts only what may be among them."""
    k = min(k, len(scores))
    n_blocks = len(scores) // _BLOCK
    if k < n_blocks:  # k blocks' largest scores are k scores: the k-th best is no lower than the lowest of them
        heads = scores[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
    else:
        heads = scores
    lowest = np.partition(heads, len(heads) - k)[len(heads) - k]
    rows = np.flatnonzero(scores >= lowest)
    return rows[np.lexsort((rows, -scores[rows]))[:k]]
