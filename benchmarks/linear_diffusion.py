"""The forms of one step of diffusion, compared with a depthwise convolution and softmax attention.

python benchmarks/linear_diffusion.py                            the explicit step
python benchmarks/linear_diffusion.py --scheme crank_nicolson    the implicit step

Before the measurement, all candidates but softmax are checked to give the same numbers and
gradients. conv1d is torch's own, with tokens in its preferred layout, channels first. Gradients are
those of tokens, weights and dt.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import benchmark_cases
import harness
import torch
import torch.nn.functional as F
from harness import BACKWARD, FORWARD, Case, run_benchmark
from results import Benchmark
from torch import Tensor

from onescan.ops.linear_diffusion import linear_diffusion, stable_step

CANDIDATES = {
    "explicit": ("conv1d", "softmax", "dense", "banded", "fft"),
    "crank_nicolson": ("dense", "banded"),
}
QUADRATIC = ("softmax", "dense")  # take time proportional to T x T or more


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    tokens: tuple[int, ...] = (512, 1024, 4096, 16384, 65536)
    """Sequence lengths."""
    scheme: Literal["explicit", "crank_nicolson"] = "explicit"
    """Time stepping scheme."""
    longest_square: int = 4096
    """Maximum number of tokens for dense and softmax, whose cost is quadratic."""
    kernels: int = 1
    """Number of diffusion kernels, each for an equal share of the channels."""
    channels: int = 384
    """Channels of a token."""
    radius: int = 64
    """Radius of a kernel, in tokens."""
    num_heads: int = 6
    """Heads of softmax attention."""
    gradients: bool = True
    """Also measure forward and backward."""


def conv1d(x: Tensor, weights: Tensor, dt: Tensor) -> Tensor:
    """Diffuse with torch's depthwise convolution."""
    kernel = (dt.unsqueeze(1) * weights).flip(1).unsqueeze(1)
    radius, (kernels, width) = weights.shape[1] // 2, x.shape[2:]
    values = x.movedim(1, -1)  # B H V T
    received = F.conv1d(
        values.flatten(1, 2),
        kernel.repeat_interleave(width, 0),
        padding=radius,
        groups=kernels * width,
    )
    row_sums = F.conv1d(x.new_ones(kernels, x.shape[1]), kernel, padding=radius, groups=kernels)
    diffused = torch.addcmul(received.view(values.shape), 1 - row_sums.unsqueeze(1), values)
    return diffused.movedim(-1, 1)


def make_call(name: str, mode: str, tokens: int, options: Options) -> Callable[[], object]:
    noise = partial(benchmark_cases.noise, options)
    groups = options.num_heads if name == "softmax" else options.kernels
    size = (options.batch_size, tokens, groups, options.channels // groups)
    x, gradient = noise(*size), noise(*size)
    if name == "softmax":
        inputs = [x, noise(*size), noise(*size)]
    else:
        weights = noise(groups, 2 * options.radius + 1).abs()
        if name == "conv1d":
            x, gradient = (y.movedim(1, -1).contiguous().movedim(-1, 1) for y in (x, gradient))
        inputs = [x, weights, stable_step(weights) / 2]
    peers = {"conv1d": conv1d, "softmax": benchmark_cases.softmax}
    op = peers.get(name) or partial(linear_diffusion, scheme=options.scheme, form=name)
    op = torch.compile(op) if options.compile else op
    if mode == BACKWARD:
        inputs = [y.requires_grad_() for y in inputs]
        return lambda: torch.autograd.grad(op(*inputs), inputs, gradient)
    return torch.no_grad()(lambda: op(*inputs))


def prepare(name: str, mode: str, tokens: int, options: Options) -> Case:
    if name in QUADRATIC and tokens > options.longest_square:
        raise ValueError(f"tokens is {tokens}, longer than --longest-square")
    return Case(make_call(name, mode, tokens, options))


def check_agreement(options: Options) -> None:
    """Raise AssertionError if the candidates give different numbers or gradients."""
    exact = replace(options, dtype="float64", compile=False)
    for mode in (FORWARD, BACKWARD):
        outputs = []
        for name in CANDIDATES[options.scheme]:
            torch.manual_seed(0)
            if name != "softmax":
                outputs.append(make_call(name, mode, 300, exact)())
        for output in outputs[1:]:
            torch.testing.assert_close(output, outputs[0])


def run(options: Options) -> None:
    for name in ("kernels", "num_heads"):
        if options.channels % getattr(options, name):
            raise ValueError(f"{name} is {getattr(options, name)}, expected a divisor of channels")
    check_agreement(options)
    benchmark = Benchmark(
        name="linear_diffusion",
        candidates=CANDIDATES[options.scheme],
        modes=(FORWARD, BACKWARD) if options.gradients else (FORWARD,),
        sizes=options.tokens,
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
