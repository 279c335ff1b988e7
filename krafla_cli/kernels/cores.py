"""How many cores there are to work with; apart from the kernels, so that asking does not import a compiler."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """The physical cores that this process may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_core_of(cpu) for cpu in allowed}
    return max(1, len(cores))


def _core_of(cpu: int) -> str:
    """What tells the physical core of a logical one: its siblings, or its own number where that is not known."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)
