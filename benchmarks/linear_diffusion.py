"""The forms of one step of diffusion against a depthwise convolution and softmax, in one run.

python benchmarks/linear_diffusion.py                            a step at growing lengths
python benchmarks/linear_diffusion.py --scheme crank_nicolson    its solves
python benchmarks/linear_diffusion.py --no-gradients             forward alone

Before anything is measured, all but softmax are held to the same numbers and gradients. conv1d is
torch's own, with its tokens laid out as it likes them best: channels first. Each figure comes from
a process of its own: the median of several calls, and the memory that the call took beyond its
inputs. Ratios are the first name's time over each; exponents are of time over length, from 4096
tokens on where two such lengths were measured. Gradients are of tokens, weights and dt.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from onescan.bench.timing import Measurement, exponent, measure
from onescan.ops.linear_diffusion import linear_diffusion, stable_step

NAMES = {
    "explicit": ("conv1d", "softmax", "dense", "banded", "fft"),
    "crank_nicolson": ("dense", "banded"),
}
SQUARE = ("softmax", "dense")  # of T x T steps or more
LONG = 4096  # tokens from which on overheads no longer matter


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    tokens: tuple[int, ...] = (512, 1024, 4096, 16384, 65536)
    scheme: Literal["explicit", "crank_nicolson"] = "explicit"
    names: tuple[Literal["conv1d", "softmax", "dense", "banded", "fft"], ...] = ()
    """all that the scheme has, where none are given; the first is what others are compared to"""
    longest_square: int = LONG
    """tokens beyond which dense and softmax are not measured"""
    batch: int = 1
    kernels: int = 1
    channels: int = 384
    radius: int = 64
    """how far a kernel reaches, in tokens"""
    heads: int = 6
    """of softmax, which divide the channels"""
    gradients: bool = True
    """measure forward and backward too"""
    dtype: str = "float32"


def conv1d(x: Tensor, weights: Tensor, dt: Tensor) -> Tensor:
    share = (dt.unsqueeze(1) * weights).flip(1).unsqueeze(1)  # dt K, H 1 2R+1
    radius, (heads, width) = weights.shape[1] // 2, x.shape[2:]
    own = x.movedim(1, -1)  # B H V T
    heard = F.conv1d(
        own.flatten(1, 2), share.repeat_interleave(width, 0), padding=radius, groups=heads * width
    )
    row_sums = F.conv1d(x.new_ones(heads, x.shape[1]), share, padding=radius, groups=heads)
    moved = torch.addcmul(heard.view(own.shape), 1 - row_sums.unsqueeze(1), own)
    return moved.movedim(-1, 1)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


PEERS = {"conv1d": conv1d, "softmax": softmax}


def prepare(name: str, tokens: int, backward: bool, options: Options) -> Callable[[], object]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def made(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=getattr(torch, options.dtype))

    heads = options.heads if name == "softmax" else options.kernels
    size = (options.batch, tokens, heads, options.channels // heads)
    x, gradient = made(*size), made(*size)
    if name == "conv1d":
        x, gradient = (y.movedim(1, -1).contiguous().movedim(-1, 1) for y in (x, gradient))
    if name == "softmax":
        inputs = (x, made(*size), made(*size))
    else:
        weights = made(heads, 2 * options.radius + 1).abs()
        inputs = (x, weights, stable_step(weights) / 2)
    inputs = [y.requires_grad_(backward) for y in inputs]
    step = PEERS.get(name) or partial(linear_diffusion, scheme=options.scheme, form=name)

    def call() -> object:
        if backward:
            return torch.autograd.grad(step(*inputs), inputs, gradient)
        with torch.no_grad():
            return step(*inputs)

    return call


def check_agreement(names: tuple[str, ...], options: Options) -> None:
    exact = replace(options, dtype="float64")
    for backward in (False, True):
        steps = [prepare(name, 300, backward, exact)() for name in names if name != "softmax"]
        for other in steps[1:]:
            torch.testing.assert_close(other, steps[0])


def table(names: tuple[str, ...], backward: bool, options: Options) -> None:
    print(f"\n{'forward + backward' if backward else 'forward'}")
    print(f"{'':<12}{'T':>7}{'ms':>11}{'x faster':>10}{'MiB':>9}")
    first: dict[int, Measurement] = {}
    for name in names:
        measured: dict[int, float] = {}
        for tokens in options.tokens:
            if name in SQUARE and tokens > options.longest_square:
                print(f"{name:<12}{tokens:>7}   not measured: --longest-square")
                continue
            cost = measure(prepare, name, tokens, backward, options)
            measured[tokens] = cost.median_ms
            if name == names[0]:
                first[tokens] = cost
            ratio = f"{first[tokens].median_ms / cost.median_ms:.2f}" if tokens in first else ""
            print(
                f"{name:<12}{tokens:>7}{cost.median_ms:>11.1f}{ratio:>10}{cost.peak_mib:>9.0f}",
                flush=True,
            )
        long = [tokens for tokens in measured if tokens >= LONG]
        fitted = long if len(long) > 1 else list(measured)
        if len(fitted) > 1:
            power = exponent(fitted, [measured[tokens] for tokens in fitted])
            print(f"{name:<12}exponent of T, {min(fitted)} to {max(fitted)}: {power:.2f}")


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    names = options.names or NAMES[options.scheme]
    if unknown := set(names) - set(NAMES[options.scheme]):
        raise SystemExit(f"{options.scheme} has no {', '.join(sorted(unknown))}")
    if options.channels % options.kernels or options.channels % options.heads:
        raise SystemExit(f"kernels and heads do not divide {options.channels} channels")
    check_agreement(names, options)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shape = f"B={options.batch} H={options.kernels} D={options.channels} R={options.radius}"
    print(f"torch {torch.__version__}, {where}, {torch.get_num_threads()} threads, "
          f"{options.dtype}, {options.scheme}, {shape}")  # fmt: skip
    for backward in (False, True)[: 1 + options.gradients]:
        table(names, backward, options)


if __name__ == "__main__":
    main()
