"""The memory that a run needs, for its record."""

import math
import os
import sys
from pathlib import Path

import torch

MIB = 2**20
STATM = Path("/proc/self/statm")


def memory_mib(device: torch.device) -> float:
    """Tell the memory in use, in MiB.

    On a GPU the most that this process's tensors have taken at once; elsewhere what of this
    process lies in memory now, or the most that did where the system tells no more than that;
    NaN where it tells nothing.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    if STATM.exists():
        resident_pages = int(STATM.read_text(encoding="ascii").split()[1])
        return resident_pages * os.sysconf("SC_PAGE_SIZE") / MIB
    return _most_resident_mib()


def _most_resident_mib() -> float:
    try:
        import resource  # not there on Windows
    except ImportError:
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
