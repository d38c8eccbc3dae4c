"""One scan against softmax attention and against two causal scans, in one run.

python benchmarks/scans.py                      the table of README.md
python benchmarks/scans.py --no-gradients       forward alone
python benchmarks/scans.py --names causal causal_lrpe causal_softmax        looking back only

Each figure comes from a process of its own: the median of several calls, and the memory that the
call took beyond its inputs. Ratios are to the first; the exponent is that of time over length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch.nn.functional import scaled_dot_product_attention

from onescan.bench.timing import Measurement, exponent, measure
from onescan.ops.additive_decay import additive_decay
from onescan.ops.lrpe import lrpe_angles, lrpe_frequencies

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def one_scan(q, k, v):
    return additive_decay(q, k, v)[0]


def one_scan_lrpe(q, k, v, *, causal=False):
    theta = lrpe_frequencies(q.shape[-1], axes=1).repeat(q.shape[2], 1).to(q.device)
    angles = lrpe_angles((q.shape[1],), theta)
    return additive_decay(q, k, v, angles=angles, causal=causal)[0]


def softmax(q, k, v, *, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def two_scans(q, k, v):
    there = additive_decay(q, k, v, causal=True, form="chunk")[0]
    q, k, v = (x.flip(1) for x in (q, k, v))
    return there + additive_decay(q, k, v, causal=True, form="chunk")[0].flip(1)


def causal(q, k, v):
    return additive_decay(q, k, v, causal=True, form="chunk")[0]


def causal_lrpe(q, k, v):
    return one_scan_lrpe(q, k, v, causal=True)


def causal_softmax(q, k, v):
    return softmax(q, k, v, causal=True)


BOTH_WAYS = (one_scan, one_scan_lrpe, softmax, two_scans)
RIVALS = {f.__name__: f for f in (*BOTH_WAYS, causal, causal_lrpe, causal_softmax)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    names: tuple[str, ...] = tuple(f.__name__ for f in BOTH_WAYS)
    """what is timed; the first is what the others are held against"""
    tokens: tuple[int, ...] = (256, 1024, 4096, 16384)
    batch: int = 4
    heads: int = 6
    width: int = 64
    """of a head"""
    gradients: bool = True
    """measure forward and backward too"""
    dtype: str = "float32"


def prepare(name: str, tokens: int, backward: bool, options: Options) -> Callable[[], object]:
    torch.manual_seed(0)
    size = (options.batch, tokens, options.heads, options.width)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = torch.randn(4, *size, device=device, dtype=getattr(torch, options.dtype))
    q, k, v, weight = (x.clone().requires_grad_(backward) for x in made)

    def call():
        o = RIVALS[name](q, k, v)
        return torch.autograd.grad(o, (q, k, v), weight) if backward else o

    return call


def table(backward: bool, options: Options) -> None:
    print(f"\n{'forward + backward' if backward else 'forward'}")
    print(f"{'':<16}{'T':>7}{'ms':>11}{'x the first':>12}{'MiB':>9}")
    first: dict[int, Measurement] = {}
    for name in options.names:
        times = []
        for tokens in options.tokens:
            cost = measure(prepare, name, tokens, backward, options)
            base = first.setdefault(tokens, cost)
            ratio = cost.median_ms / base.median_ms
            print(
                f"{name:<16}{tokens:>7}{cost.median_ms:>11.1f}{ratio:>12.2f}{cost.peak_mib:>9.0f}"
            )
            times.append(cost.median_ms)
        if len(times) > 1:
            print(f"{name:<16}exponent of T: {exponent(options.tokens, times):.2f}")


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    where = "CPU"
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    shape = f"B={options.batch} H={options.heads} K=V={options.width}"
    print(f"torch {torch.__version__}, {where}, {torch.get_num_threads()} threads, "
          f"{options.dtype}, {shape}")  # fmt: skip
    for backward in (False, True)[: 1 + options.gradients]:
        table(backward, options)


if __name__ == "__main__":
    main()
