"""Large tensors lie in huge pages where commands run, if Linux has them for who asks."""

import os
import subprocess
import sys

import pytest

from onescan import huge_pages

MADVISED = huge_pages.MODE.exists() and "[madvise]" in huge_pages.MODE.read_text()

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


def in_huge_pages(asked):
    """KiB of a process that ran a command and holds 64 MiB."""
    others = {name: value for name, value in os.environ.items() if name != huge_pages.VARIABLE}
    given = others if asked is None else {**others, huge_pages.VARIABLE: asked}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], env=given, capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(not MADVISED, reason="Linux gives huge pages to all, or to nobody")
def test_commands_ask_for_huge_pages_unless_told_not_to():
    assert in_huge_pages(None) > 0
    assert in_huge_pages("0") == 0


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
    monkeypatch.setattr(huge_pages, "MODE", file)
    monkeypatch.delenv(huge_pages.VARIABLE, raising=False)
    if asked is not None:
        monkeypatch.setenv(huge_pages.VARIABLE, asked)
    assert huge_pages.are_used() is used
