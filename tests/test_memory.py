"""Large tensors lie in huge pages and in memory used before, where commands run on Linux."""

import os
import platform
import subprocess
import sys

import pytest

from onescan import memory

SAID = (memory.HUGE_PAGES, memory.TUNABLES, *memory.TOLD)
MADVISED = memory.MODE.exists() and "[madvise]" in memory.MODE.read_text()

FROM_GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "malloc" in os.environ.get("LD_PRELOAD", ""),
    reason="memory comes from another library",
)

COMMAND = """
import sys
from onescan.cli import main
main(["--version"])
assert "torch" not in sys.modules  # it would have looked already
import torch
x = torch.ones(2**24)
for line in open("/proc/self/smaps_rollup"):
    if line.startswith("AnonHugePages"):
        print(line.split()[1])
"""

ALLOCATIONS = """
import ctypes, resource
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: new memory has many pages then
from onescan import memory
from onescan.cli import main
main(["recipes"])
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def fill():
    torch.empty(2**24).fill_(1.0)
def new_pages():
    before = faults()
    fill()
    return faults() - before
for _ in range(8):  # at first not every gap can be used again
    fill()
again = new_pages()
memory.hand_back_freed()
print(again, new_pages())
"""


def printed(program, **changed):
    """The whole numbers that a process prints last, with some variables set, others not at all."""
    others = {name: value for name, value in os.environ.items() if name not in SAID}
    done = subprocess.run(
        [sys.executable, "-c", program], env=others | changed, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return [int(word) for word in done.stdout.splitlines()[-1].split()]


@pytest.mark.skipif(not MADVISED, reason="Linux gives huge pages to all, or to nobody")
def test_commands_ask_for_huge_pages_unless_told_not_to():
    assert printed(COMMAND) > [0]
    assert printed(COMMAND, **{memory.HUGE_PAGES: "0"}) == [0]


@FROM_GLIBC
def test_commands_keep_what_is_freed_unless_told_otherwise():
    half = 2**26 // os.sysconf("SC_PAGE_SIZE") // 2  # of a tensor's pages
    again, handed_back = printed(ALLOCATIONS)
    assert again < half < handed_back
    again, _ = printed(ALLOCATIONS, MALLOC_TRIM_THRESHOLD_="1000000")
    assert again > half


@FROM_GLIBC
@pytest.mark.parametrize(
    ("name", "value", "can"),
    [
        *((name, "1", False) for name in memory.TOLD),
        (memory.TUNABLES, "glibc.rtld.nns=4:glibc.malloc.trim_threshold=1000", False),
        (memory.TUNABLES, "glibc.rtld.nns=4", True),
    ],
)
def test_what_is_freed_is_kept_unless_a_variable_says_how(name, value, can, monkeypatch):
    for each in SAID:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    assert memory.can_keep_freed() == can


@pytest.mark.parametrize("other", ["another malloc", "another C library"])
def test_other_libraries_keep_as_they_always_do(other, monkeypatch):
    load = memory.ctypes.CDLL

    def loaded(name):
        if name is not None:
            if other == "another C library":
                raise OSError(f"{name}: cannot open shared object file")
            return load(name)
        program = load(None)
        program.posix_memalign = program.free  # any address but glibc's
        return program

    monkeypatch.setattr(memory.ctypes, "CDLL", loaded)
    assert not memory.can_keep_freed()
    memory.keep_freed()
    memory.hand_back_freed()


@pytest.mark.parametrize(
    ("mode", "asked", "used"),
    [
        ("always [madvise] never\n", "1", True),
        ("always [madvise] never\n", "0", False),
        ("always [madvise] never\n", None, False),
        ("[always] madvise never\n", None, True),
        ("always madvise [never]\n", "1", False),
        (None, "1", False),
    ],
)
def test_whether_huge_pages_are_used(mode, asked, used, tmp_path, monkeypatch):
    file = tmp_path / "enabled"
    if mode is not None:
        file.write_text(mode)
    monkeypatch.setattr(memory, "MODE", file)
    monkeypatch.delenv(memory.HUGE_PAGES, raising=False)
    if asked is not None:
        monkeypatch.setenv(memory.HUGE_PAGES, asked)
    assert memory.has_huge_pages() is used
