"""The benchmark of denoisers, as it is run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def printed():
    command = [sys.executable, "tests/forking.py", "benchmarks/denoisers.py", "--device", "cpu"]
    options = ["--what", "inference", "--sides", "4", "8", "3", "--depth", "1", "--rounds", "1"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_says_what_is_measured(printed):
    assert "CPU" in printed[0]
    assert printed[1].startswith("DiT: 1 blocks of 12; time is linear in them, width 384")
    assert printed[2].startswith("LightNet: 2 blocks of 18; time is linear in them, width 384")


@pytest.mark.parametrize("name", ["DiT", "LightNet"])
def test_it_prints_every_side_and_the_exponent(name, printed):
    rows = [line.split() for line in printed if line.startswith(f"{name} ")]
    assert [row[1:3] for row in rows[:2]] == [["4", "4"], ["8", "16"]]
    assert [len(row) for row in rows[:2]] == [10, 10]
    assert rows[3][1:4] == ["exponent", "of", "T:"]


@pytest.mark.parametrize("name", ["DiT", "LightNet"])
def test_what_is_refused_is_listed_with_its_error(name, printed):
    line = next(line for line in printed if line.startswith(f"{name} ") and " 3 " in line)
    assert "ValueError: input of size 3 x 3 cannot be cut" in line
