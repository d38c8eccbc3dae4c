"""Pages of 2 MiB for large tensors on a CPU, where Linux gives them to programs that ask.

Torch asks where a variable of the environment says so when it makes its first tensor. Without, new
memory costs a fault for every 4 KiB that is touched: up to a third of the time of one long scan.
"""

import os
from pathlib import Path

VARIABLE = "THP_MEM_ALLOC_ENABLE"  # torch's
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # such as: always [madvise] never


def ask() -> None:
    """Let torch ask, unless somebody has said otherwise; to be called before it is imported."""
    os.environ.setdefault(VARIABLE, "1")


def are_used() -> bool:
    """Whether large tensors get them."""
    mode = MODE.read_text(encoding="utf-8") if MODE.exists() else ""
    return "[always]" in mode or ("[madvise]" in mode and os.environ.get(VARIABLE) == "1")
