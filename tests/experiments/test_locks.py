"""Locks on folders: one holder, and none that outlives its process."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import tiny_run

from onescan.experiments.locks import locked
from onescan.experiments.training import train

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from onescan.experiments.locks import locked

with locked(Path(sys.argv[1])):
    {then}
    print("held", flush=True)
    time.sleep(60)
"""
FORK = """
    import os

    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, b"forked")
        time.sleep(5)
        os._exit(0)
    os.read(read, 6)
"""


@pytest.fixture
def hold(tmp_path):
    """Start a process that holds the lock of tmp_path."""
    processes = []

    def start(then=""):
        command = [sys.executable, "-c", HOLD.format(then=then), tmp_path]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


ON_POSIX = pytest.mark.skipif(sys.platform == "win32", reason="processes cannot fork")


@pytest.mark.parametrize(
    "then", [pytest.param("", id="alone"), pytest.param(FORK, id="forked", marks=ON_POSIX)]
)
def test_the_lock_of_a_killed_process_is_released(tmp_path, hold, then):
    """Also while a process that it forked is still running."""
    holder = hold(then)
    with pytest.raises(ValueError, match=r"another process is using .*: wait until it ends, or"):
        locked(tmp_path).__enter__()
    holder.kill()
    holder.wait()
    begin = time.monotonic()
    with locked(tmp_path):
        pass
    assert time.monotonic() - begin < 1


def test_a_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "new"):
        raise KeyError
    with locked(tmp_path / "new"):
        pass


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="lock is a symbolic link, expected a file"):
        locked(tmp_path).__enter__()
    assert (tmp_path / "outside").read_text() == "mine"


def test_a_file_system_without_locks_is_not_called_busy(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", refuse)
    with pytest.raises(OSError, match=r"cannot write to .*: Function not implemented"):
        train(tiny_run(), tmp_path)
