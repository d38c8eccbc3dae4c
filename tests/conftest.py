"""How every test runs: one thread, fixed seeds, and memory that shows when it is read unwritten.

Tests see a GPU under `-m gpu` alone: then kernels run there, all others are the same everywhere.
"""

import gc
import os
import signal
import socket
from collections import defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads; make test fills the cores

import pytest
import torch
from hypothesis import register_random, settings


class TorchRandom:
    """Torch's generator, as hypothesis wants it: a failing example then fails again."""

    seed = torch.manual_seed
    getstate = torch.get_rng_state
    setstate = torch.set_rng_state


register_random(TorchRandom)
settings.register_profile("onescan", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("onescan")


def pytest_configure(config):
    gc.set_threshold(
        50_000
    )  # with Python's 700, the search for garbage takes 6% of the tests' time
    asked_for = config.getoption("markexpr")
    if "gpu" not in asked_for or "not gpu" in asked_for:
        os.environ.update(CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")
    # whether kernels run in Python, which Triton asks when it is imported
    os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
    # torch's own: inductor and forward-mode differentiation use torch.jit, dynamo makes an autograd
    # function to trace it and looks at a gradient, the poison asks GPU kernels for more than each
    # of them has, a backward may multiply matrices first on a thread, and readers are forked
    # beside threads.
    for warning in (
        ".torch.jit.script:FutureWarning",
        ".torch.jit:DeprecationWarning",
        ".*should not be instantiated:DeprecationWarning",
        ".*use_deterministic_algorithms:UserWarning",
        "Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
        "The .grad attribute of a Tensor:UserWarning",
        ".*may lead to deadlocks:DeprecationWarning",
        "invalid escape sequence::.*/torchao/",  # not cached if first imported by onescan
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark as slow all but n cases of each test `sampled(n)`; the n are spread over the list."""
    cases = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("sampled")) and not item.get_closest_marker("slow"):
            n = mark.args[0] if mark.args else 1
            cases[item.nodeid.partition("[")[0], n].append(item)
    for (_, n), sampled in cases.items():
        fast = {i * (len(sampled) - 1) // max(1, n - 1) for i in range(n)}
        for i in set(range(len(sampled))) - fast:
            sampled[i].add_marker("slow")


def pytest_collection_finish():
    gc.freeze()  # what has been imported is never garbage


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no GPU, or none asked for: -m gpu")


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """Keep caches of data out of the home folder, and every call off the network."""

    def refuse(*_):
        raise AssertionError("the network was used")

    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("cache"))
        patch.setenv("ONESCAN_CACHE", cache)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
        patch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", f"{cache}/downloads")
        patch.setattr(socket, "getaddrinfo", refuse)
        # As behind a proxy, where data sources do not look up the hub's name first.
        patch.setattr("onescan.experiments.data.sources.getproxies", lambda: {"https": "proxy"})
        yield


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _interruptible():
    """Restore the default SIGINT handler if it is ignored, as in `nohup make test &`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Let torch.empty and its kin come filled with NaN, integers with their largest value."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
