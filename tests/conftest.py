"""How every test runs: one thread, fixed seeds, and memory that shows when it is read unwritten."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads; make test fills the cores

import pytest
import torch
from hypothesis import register_random, settings

if not torch.cuda.is_available():  # kernels then run in Python; Triton asks when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


class TorchRandom:
    """Torch's generator, as hypothesis wants it: a failing example then fails again."""

    seed = torch.manual_seed
    getstate = torch.get_rng_state
    setstate = torch.set_rng_state


register_random(TorchRandom)
settings.register_profile("onescan", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("onescan")


def pytest_configure(config):
    # torch's own: inductor still uses torch.jit, dynamo makes an autograd function to trace it and
    # looks at a gradient, the poison asks GPU kernels for more than each of them has, and readers
    # are forked beside threads.
    for warning in (
        ".torch.jit:DeprecationWarning",
        ".*should not be instantiated:DeprecationWarning",
        ".*use_deterministic_algorithms:UserWarning",
        "The .grad attribute of a Tensor:UserWarning",
        ".*may lead to deadlocks:DeprecationWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Let torch.empty and its kin come filled with NaN, integers with their largest value."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
