"""Writing a .npy file row by row, so that a large result never has to be in memory as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from krafla_cli.formats.atomic import atomic_output


@contextlib.contextmanager
def float32_rows(
    target: str | os.PathLike[str], n_rows: int, n_cols: int, force: bool = False, inputs: tuple[Path, ...] = ()
) -> Iterator[Callable[[npt.NDArray[np.float32]], None]]:
    """Gives a function that appends rows [n, n_cols] to a float32 .npy of [n_rows, n_cols].

    The file appears when the block ends without an error and all rows are there (ValueError otherwise). Raises
    FileError as :func:`~krafla_cli.formats.atomic.atomic_output`.
    """
    n_written = 0
    with atomic_output(target, force, inputs) as f:
        header = {"descr": "<f4", "fortran_order": False, "shape": (n_rows, n_cols)}
        np.lib.format.write_array_header_1_0(f, header)

        def append(rows: npt.NDArray[np.float32]) -> None:
            nonlocal n_written
            f.write(np.ascontiguousarray(rows, "<f4").data)
            n_written += len(rows)

        yield append
        if n_written != n_rows:
            raise ValueError(f"{n_written} of {n_rows} rows were written")
