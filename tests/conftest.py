"""Settings of all tests: one thread, fixed seeds, and NaN in uninitialized memory.

A GPU is visible only with `-m gpu`, which runs kernels on it. All other tests run the same on every
machine.
"""

import functools
import gc
import inspect
import os
import signal
import socket
from collections import defaultdict
from typing import get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads; make test fills the cores

import jaxtyping
import numpy as np
import pytest
import torch
from beartype import BeartypeConf, beartype
from hypothesis import register_random, settings


class TorchRandom:
    """Torch's generator with the interface of hypothesis, so that failures are reproducible."""

    seed = torch.manual_seed
    getstate = torch.get_rng_state
    setstate = torch.set_rng_state


register_random(TorchRandom)
settings.register_profile("onescan", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("onescan")


def _names_a_shape(hint):
    if isinstance(hint, str):  # not evaluated
        return True
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_names_a_shape, get_args(hint)))


def _checked(fn=None, *, typechecker, jaxtyped=jaxtyping.jaxtyped):
    """Check the types of all arguments, and shapes only in functions whose annotations have some.

    The option --jaxtyping-packages decorates all functions with jaxtyped. Where there is no shape
    to check, this took a fifth of the time of tests of models and mixers.
    """
    if fn is None:
        return functools.partial(_checked, typechecker=typechecker)
    hints = getattr(fn, "__annotations__", {})
    if not inspect.isfunction(fn) or any(map(_names_a_shape, hints.values())):
        return jaxtyped(fn, typechecker=typechecker)
    if not hints:
        return fn
    typed = beartype(conf=BeartypeConf(violation_type=TypeError))(fn)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        __tracebackhide__ = True
        return (fn if jaxtyping.config.jaxtyping_disable else typed)(*args, **kwargs)

    return call


jaxtyping.jaxtyped = _checked


def pytest_configure(config):
    # With Python's default of 700, garbage collection takes 6% of the time of the tests.
    gc.set_threshold(50_000)
    asked_for = config.getoption("markexpr")
    if "gpu" not in asked_for or "not gpu" in asked_for:
        os.environ.update(CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")
    # Whether kernels run in Triton's interpreter, which Triton reads when it is imported.
    os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
    # Warnings that torch causes itself: inductor and forward-mode differentiation use torch.jit,
    # dynamo instantiates an autograd function to trace it and reads a gradient, `_poisoned_memory`
    # requires deterministic kernels that do not all exist on a GPU, a backward pass may call cuBLAS
    # first on a new thread, and data readers are forked while threads run.
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


@pytest.hookimpl(tryfirst=True)  # before -m selects tests
def pytest_collection_modifyitems(items):
    """Mark all but n cases of each test `sampled(n)` as slow; the n are spread over the list."""
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
    gc.freeze()  # imported modules are never garbage


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("requires a GPU and -m gpu")


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """Keep caches of data out of the home folder, and block the network."""

    def refuse(*_):
        raise AssertionError("the network was used")

    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("cache"))
        patch.setenv("ONESCAN_CACHE", cache)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
        patch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", f"{cache}/downloads")
        patch.setattr(socket, "getaddrinfo", refuse)
        # As behind a proxy, where data sources do not look up the hub's name first.
        patch.setattr("onescan.checkpoint.hub.getproxies", lambda: {"https": "proxy"})
        yield


@pytest.fixture
def _unchecked(monkeypatch):
    """Calls without the type checks, as users make them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True)
def _seed(request):
    """Let random numbers, also those of a module's RNG, depend on the test alone."""
    torch.manual_seed(0)
    rng = getattr(request.module, "RNG", None)
    if isinstance(rng, np.random.Generator):
        rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.fixture(autouse=True)
def _interruptible():
    """Restore the default SIGINT handler if it is ignored, as in `nohup make test &`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Fill memory from torch.empty and similar calls with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
