"""How many threads the libraries below the embedder use; they read the environment when they are first imported."""

from __future__ import annotations

import os


def limit_library_threads(threads: int | None) -> int:
    """Sets up BLAS and the tokenizer for ``threads`` (None: the physical cores) and returns that number.

    Batches run side by side, each on one thread, so that BLAS must not start threads of its own. What the user's
    environment says stays. To be called before NumPy is imported.
    """
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ.setdefault(name, "1")
    if threads is None:
        from krafla_cli.kernels.cores import physical_cores

        threads = physical_cores()
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    return threads
