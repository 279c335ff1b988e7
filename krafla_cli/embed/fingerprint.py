"""Finding out whose copy a model is: every license's rotation is tried on the embeddings of fixed texts.

Source: the LEMB specification, section 7. A fingerprinted model embeds as the reference does, rotated: S = E Rt. For
each license's R = diag(R_b), one block for each Matryoshka width, two things are computed:

- its score ||S - E Rt|| / ||S||: 0 is equal, 1.4 unrelated;
- its evidence sum_b tr(R_bt P_b) / sqrt(number of blocks), with P the orthogonal matrices that fit S = E Pt best
  (orthogonal Procrustes, block by block). If S has nothing to do with R, each R_bt P_b is Haar-distributed, and the
  trace of such a matrix is as good as normal with mean 0 and variance 1 (Diaconis, Shahshahani 1994). The evidence is
  then a standard normal number, whatever the models are; if R is the mark, it is near output_dim / sqrt(blocks).

The score judges how alike the embeddings are, and a few strong directions decide it; the evidence weighs all directions
alike, which is why it still tells licenses apart when a coarser quantization blurs the embeddings.

A copy may have been packed with other Matryoshka widths than the reference has, and R follows the widths that a copy
was packed with; a header may also have been changed since. So the widths of both files are tried, and a license has
the stronger evidence of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from krafla_cli.embed.embedder import Embedder
from krafla_cli.embed.probes import MIN_PROBES, probe_texts
from krafla_cli.embed.registry import License
from krafla_cli.embed.rotation import blocks_of, rotation
from krafla_cli.errors import InputError
from krafla_cli.progress import SILENT, Progress

Float64 = npt.NDArray[np.float64]

# A license that did not mark the suspect reaches this with probability 1e-9, at one set of widths.
MIN_EVIDENCE = 6.0


@dataclass(frozen=True)
class Score:
    """How far the suspect is from the reference rotated for ``license``: ``total`` over the whole width, ``blocks``
    for each block between the Matryoshka widths ``dims`` by itself; and the ``evidence`` that it was so rotated.
    """

    license: License
    dims: tuple[int, ...]
    total: float
    blocks: tuple[float, ...]
    evidence: float


@dataclass(frozen=True)
class Detection:
    """``match`` is the license whose fingerprint the suspect has, None if it has none of the registry's.

    ``scores`` are all licenses', the strongest evidence first; ``unmarked`` is the score of the reference as it is;
    ``procrustes`` that of the best orthogonal matrices there are: how alike the models are when rotated at will.
    """

    scores: tuple[Score, ...]
    unmarked: float
    procrustes: float
    n_probes: int

    @property
    def match(self) -> License | None:
        best = self.scores[0] if self.scores else None
        return best.license if best is not None and best.evidence >= MIN_EVIDENCE else None

    @property
    def margin(self) -> float | None:
        """By how much the best other score, of a license or of the unmarked reference, exceeds the first's."""
        if not self.scores:
            return None
        return min([self.unmarked, *(s.total for s in self.scores[1:])]) - self.scores[0].total


def detect(
    suspect: Embedder, reference: Embedder, licenses: Mapping[int, License], progress: Progress = SILENT
) -> Detection:
    """Whose fingerprint ``suspect`` has. ``reference`` is the unmarked model, with embeddings of the same length.

    Raises InputError: the reference has a fingerprint itself, the lengths differ, or are too short to tell.
    """
    _check_comparable(suspect, reference)
    texts = probe_texts(max(MIN_PROBES, 2 * reference.dims[-1]))
    s, e = (embedder.embed(texts).astype(np.float64) for embedder in (suspect, reference))
    fitted = {dims: _procrustes(s, e, dims) for dims in (reference.dims, suspect.dims)}
    progress.start("trying licenses", len(licenses), "license")
    scores = []
    for entry in licenses.values():
        tried = (_score(s, e, blocks, entry, dims) for dims, blocks in fitted.items())
        scores.append(max(tried, key=lambda score: score.evidence))
        progress.advance(1)
    progress.finish()
    scores.sort(key=lambda score: -score.evidence)
    best = fitted[scores[0].dims if scores else reference.dims]
    return Detection(tuple(scores), _distance(s, e, [np.eye(s.shape[1])])[0], _distance(s, e, best)[0], len(texts))


def _check_comparable(suspect: Embedder, reference: Embedder) -> None:
    if reference.model.header.has_fingerprint:
        raise InputError("the reference has a fingerprint itself: give the model as it was packed without one")
    ours, theirs = reference.dims[-1], suspect.dims[-1]
    if ours != theirs:
        raise InputError(f"the suspect's embeddings have {theirs} values, the reference's {ours}: nothing to compare")
    n_blocks = min(len(reference.dims), len(suspect.dims))
    strongest = ours / n_blocks**0.5
    if strongest <= MIN_EVIDENCE:
        raise InputError(
            f"embeddings of {ours} values in {n_blocks} Matryoshka blocks are too short to tell licenses "
            f"apart: the evidence could reach {strongest:.1f}, a match needs {MIN_EVIDENCE:.1f}"
        )


def _score(s: Float64, e: Float64, fitted: list[Float64], entry: License, dims: tuple[int, ...]) -> Score:
    blocks = rotation(entry.key, entry.license_id, dims)
    traces = sum(float(np.vdot(r, p)) for r, p in zip(blocks, fitted, strict=True))
    return Score(entry, dims, *_distance(s, e, blocks), traces / len(blocks) ** 0.5)


def _distance(s: Float64, e: Float64, blocks: list[Float64]) -> tuple[float, tuple[float, ...]]:
    """||S - E Rt|| / ||S|| for R = diag(blocks), S and E [probes, output_dim]: of all, and block by block."""
    errors, norms = [], []
    start = 0
    for block in blocks:
        part = slice(start, start + len(block))
        errors.append(float(np.square(s[:, part] - e[:, part] @ block.T).sum()))
        norms.append(float(np.square(s[:, part]).sum()))
        start = part.stop
    return _ratio(sum(errors), sum(norms)), tuple(map(_ratio, errors, norms))


def _ratio(error: float, norm: float) -> float:
    return float((error / norm) ** 0.5) if norm else 0.0


def _procrustes(s: Float64, e: Float64, dims: tuple[int, ...]) -> list[Float64]:
    """For each block the orthogonal P that minimizes ||S - E Pt||: U Vt of St E = U diag V."""
    found = []
    for start, end in blocks_of(dims):
        u, _, vt = np.linalg.svd(s[:, start:end].T @ e[:, start:end])
        found.append(u @ vt)
    return found
