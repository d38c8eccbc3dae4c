"""Where this process runs kernels: on a GPU under `pytest -m gpu`, else in Python, on a CPU."""

import pytest
import torch

GPU = torch.cuda.is_available()  # conftest.py hides those that -m gpu does not ask for
DEVICE = "cuda" if GPU else "cpu"
SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
DTYPES = [SINGLE, HALF, *([BRAIN] if GPU else [])]  # the interpreter multiplies no bfloat16
SEEDS, LONGEST = (100, 300) if GPU else (3, 24)  # of random shapes: Python takes its time

MARKS = [pytest.mark.gpu] if GPU else []  # pytestmark of each file that runs kernels

over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
over_seeds = pytest.mark.parametrize("seed", range(SEEDS))
interpreted = pytest.mark.skipif(GPU, reason="kernels are not interpreted on a GPU")


def on_device(*tensors):
    """Each of these where kernels run."""
    return [x.to(DEVICE) for x in tensors]


def drawn(seed, *most):
    """A number from 1 to each of these."""
    g = torch.Generator().manual_seed(seed)
    return [1 + int(torch.randint(n, (), generator=g)) for n in most]


def assert_errors_like_torch(found, usual, exact, dtype):
    """Errors of each tensor, at most a few times torch's or a few roundings of its largest.

    In float32, GPUs compute exponentials and quotients less accurately than torch on a CPU.
    """
    factor = 4 if GPU and dtype is SINGLE else 2
    rounding = max(torch.finfo(dtype).eps, 8 * torch.finfo(SINGLE).eps)
    for x, y, expected in zip(found, usual, exact, strict=True):
        error, allowed = ((z - expected).square().mean().sqrt() for z in (x, y))
        assert error <= max(factor * allowed, rounding * expected.abs().max())


def assert_a_graph_repeats(call):
    """A tensor that is computed once more by a CUDA graph is the same to the last bit."""
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)
