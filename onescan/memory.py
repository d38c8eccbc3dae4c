"""Memory of a CPU's large tensors: in pages of 2 MiB, and kept for the next tensor when freed.

New memory costs a fault for every page that is touched, and the kernel fills it with zeros: up to a
third of the time of one long scan. Linux gives large pages to programs that ask, and torch asks
where a variable of the environment says so when it makes its first tensor. The C library, glibc,
gives what is freed back to Linux, if it is more than 32 MiB, unless it is told to keep it.
"""

import ctypes
import os
from pathlib import Path

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch's variable
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # such as: always [madvise] never
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's, for mallopt
# its variables that say how memory is handed out
TOLD = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")
TUNABLES = "GLIBC_TUNABLES"  # all of glibc's at once, as in glibc.malloc.trim_threshold=1000000


def ask_for_huge_pages() -> None:
    """Let torch ask, unless somebody has said otherwise; to be called before it is imported."""
    os.environ.setdefault(HUGE_PAGES, "1")


def has_huge_pages() -> bool:
    """Whether large tensors get them."""
    mode = MODE.read_text(encoding="utf-8") if MODE.exists() else ""
    return "[always]" in mode or ("[madvise]" in mode and os.environ.get(HUGE_PAGES) == "1")


def can_keep_freed() -> bool:
    """Whether memory comes from glibc, and nobody has told it otherwise."""
    is_told = any(name in os.environ for name in TOLD)
    is_told |= "glibc.malloc" in os.environ.get(TUNABLES, "")
    return not is_told and _of_glibc("mallopt") is not None


def keep_freed() -> None:
    """Let this process keep what is freed, if it can."""
    mallopt = _of_glibc("mallopt")
    if mallopt is not None and can_keep_freed():
        mallopt(M_MMAP_MAX, 0)  # memory that is mapped would be unmapped
        mallopt(M_TRIM_THRESHOLD, -1)  # never


def hand_back_freed() -> None:
    """Give back what was kept, whoever told it to keep it."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> "ctypes._NamedFuncPointer | None":
    """A function of glibc, if torch's tensors are too: jemalloc, say, may be in malloc's place.

    Torch asks posix_memalign for them. Of malloc a Python that is linked to a fixed place has an
    address of its own, though it is glibc's.
    """
    try:
        glibc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library, or no Linux
        return None
    taken = ctypes.CDLL(None).posix_memalign
    return getattr(glibc, name, None) if _address(taken) == _address(glibc.posix_memalign) else None


def _address(function: "ctypes._NamedFuncPointer") -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
