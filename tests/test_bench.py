"""Measuring: times and memory that mean what they say, and the benchmark as it is run."""

import os
import runpy
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from onescan.bench import timing
from onescan.bench.timing import exponent, measure
from onescan.models.size import model_size

ROOT = Path(__file__).parents[1]
MIB = 2**20


def filling(mib):
    torch.ones(6 * mib, MIB // 4)  # neither what was taken and given back before counts
    held = torch.ones(mib, MIB // 4)  # nor what is there
    return lambda: held.repeat(3, 1)


def after_small_pieces(mib):
    pieces = [torch.ones(1, MIB // 4) for _ in range(2 * mib)]  # which glibc keeps when freed
    del pieces
    return lambda: torch.ones(mib, MIB // 4).sum()


def dying():
    return lambda: os._exit(3)


def test_memory_is_what_the_call_takes_beyond_what_was_there():
    cost = measure(filling, 50)
    assert cost.median_ms > 0
    assert 0.9 * 150 < cost.peak_mib < 1.1 * 150


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory once kept is not given back")
def test_memory_that_was_freed_hides_nothing():
    assert 0.9 * 20 < measure(after_small_pieces, 20).peak_mib < 1.5 * 20


def test_a_dead_process_is_an_error():
    with pytest.raises(RuntimeError, match="ended with 3"):
        measure(dying)


def test_the_exponent_of_noisy_times():
    assert exponent([10, 100, 1000], [1.1, 9.0, 110.0]) == pytest.approx(1, abs=0.02)
    assert exponent([10, 100], [1.0, 100.0]) == pytest.approx(2)


def test_the_benchmark_of_diffusion_prints_every_name():
    command = [sys.executable, "tests/forking.py", "benchmarks/linear_diffusion.py"]
    options = ["--tokens", "8", "16", "--names", "conv1d", "banded", "--no-gradients"]
    done = subprocess.run(
        [*command, *options, "--channels", "12", "--kernels", "2", "--radius", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in ("conv1d", "banded"):
        assert sum(line.startswith(f"{name} ") for line in done.stdout.splitlines()) == 3


def test_every_model_in_the_tables_of_the_benchmark_of_mixers_can_be_small():
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "mixers.py"))
    options = benchmark["Options"](data="anywhere")
    sizes = {
        name: model_size(benchmark["small"](name, 0, options).model).parameters
        for name in chain(*benchmark["TABLES"].values())
    }
    assert max(sizes.values()) < 500_000
    assert sizes["cifar10_vit"] == pytest.approx(sizes["cifar10_ldn"], rel=0.02)
    assert sizes["cifar10_deit"] == pytest.approx(sizes["cifar10_lightnet"], rel=0.1)


@pytest.mark.parametrize(("written", "mib"), [("1048576\n", 1.0), ("max\n", None), (None, None)])
def test_a_container_may_have_less_memory_than_the_machine(written, mib, tmp_path, monkeypatch):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MIB
    monkeypatch.setattr(timing, "CONTAINER", tmp_path / "memory.max")
    if written is not None:
        timing.CONTAINER.write_text(written)
    assert timing.total_mib() == (mib or whole)
