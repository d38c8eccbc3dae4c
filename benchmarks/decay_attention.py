"""The three forms of decayed attention against softmax attention, in one run.

python benchmarks/decay_attention.py                      the tables of docs/results.md
python benchmarks/decay_attention.py --decay diagonal     a decay for each key channel
python benchmarks/decay_attention.py --no-gradients       forward alone

Both directions, divided by the row sum, as LION's mixers call it. Each figure comes from a process
of its own: the median of several calls, and the memory that the call took beyond its inputs.
Ratios are softmax's time over the form's; the exponent is that of time over length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from onescan.bench.timing import Measurement, exponent, measure
from onescan.ops.decay_attention import decay_attention

NAMES = ("softmax", "full", "chunk", "recurrent")
LONGEST = {"full": 4096, "recurrent": 1024}  # beyond, with gradients, memory runs out


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    tokens: tuple[int, ...] = (196, 512, 1024, 4096, 16384)
    names: tuple[Literal["softmax", "full", "chunk", "recurrent"], ...] = NAMES
    """the first is what the others are compared to"""
    decay: Literal["none", "fixed", "selective", "diagonal"] = "selective"
    batch: int = 4
    heads: int = 6
    width: int = 64
    """of a head"""
    chunk_size: int = 64
    gradients: bool = True
    """measure forward and backward too"""
    dtype: str = "float32"


def log_decay(tokens: int, options: Options, made: Callable[..., Tensor]) -> Tensor | None:
    shapes = {
        "fixed": (options.heads,),
        "selective": (options.batch, tokens, options.heads),
        "diagonal": (options.batch, tokens, options.heads, options.width),
    }
    if options.decay == "none":
        return None
    return logsigmoid(made(*shapes[options.decay]) + 2)


def prepare(name: str, tokens: int, backward: bool, options: Options) -> Callable[[], object]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def made(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=getattr(torch, options.dtype))

    size = (options.batch, tokens, options.heads, options.width)
    q, k, v, weight = made(*size).sigmoid(), made(*size).sigmoid(), made(*size), made(*size)
    decay = None if name == "softmax" else log_decay(tokens, options, made)
    leaves = [x.requires_grad_(backward) for x in (q, k, v, decay) if x is not None]

    def attend() -> Tensor:
        if name == "softmax":
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(*heads_first).transpose(1, 2)
        return decay_attention(
            q, k, v, decay, normalize="sum",
            form=name, chunk_size=options.chunk_size, return_state=False,
        )[0]  # fmt: skip

    def call() -> object:
        if backward:
            return torch.autograd.grad(attend(), leaves, weight)
        with torch.no_grad():
            return attend()

    return call


def table(backward: bool, options: Options) -> None:
    print(f"\n{'forward + backward' if backward else 'forward'}")
    print(f"{'':<12}{'T':>7}{'ms':>11}{'x faster':>10}{'MiB':>9}")
    first: dict[int, Measurement] = {}
    for name in options.names:
        measured: dict[int, float] = {}
        for tokens in options.tokens:
            if tokens > LONGEST.get(name, tokens):
                print(f"{name:<12}{tokens:>7}   not measured: too much memory")
                continue
            cost = measure(prepare, name, tokens, backward, options)
            base = first.setdefault(tokens, cost)
            ratio = base.median_ms / cost.median_ms
            print(
                f"{name:<12}{tokens:>7}{cost.median_ms:>11.1f}{ratio:>10.2f}{cost.peak_mib:>9.0f}",
                flush=True,
            )
            measured[tokens] = cost.median_ms
        if len(measured) > 1:
            power = exponent(list(measured), list(measured.values()))
            print(f"{name:<12}exponent of T: {power:.2f}")


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shape = f"B={options.batch} H={options.heads} K=V={options.width}, {options.decay} decay"
    print(f"torch {torch.__version__}, {where}, {torch.get_num_threads()} threads, "
          f"{options.dtype}, {shape}")  # fmt: skip
    for backward in (False, True)[: 1 + options.gradients]:
        table(backward, options)


if __name__ == "__main__":
    main()
