"""One additive scan over all tokens, compared with two causal scans and softmax attention.

Bidirectional attention as in LightNet, arXiv:2405.21022, Fig. 2, whose two scans are Lightning
Attention, arXiv:2401.04658: causal linear attention with one fixed decay per head, in both
directions. Here, they are "two_decay_scans", with RetNet's decays. "two_scans" are causal additive
decay in both directions, a more expensive op. "copy" copies as many bytes as one_scan must read and
write at least.

In the paper, the advantage of one scan grows with the length. On a CPU, the time of two scans
relative to one hardly grows beyond 1,024 tokens, because all three take linear time.
"""

from dataclasses import dataclass

import harness
from benchmark_cases import copy_case, noise, op_case, softmax
from harness import BACKWARD, FORWARD, Case, run_benchmark
from results import Benchmark
from torch import Tensor
from torch.nn.functional import logsigmoid

from onescan.layers.decays import retnet_logits
from onescan.ops import additive_decay, decay_attention, lrpe_angles
from onescan.ops.lrpe import lrpe_frequencies
from onescan.shapes import Angles

CANDIDATES = ("one_scan", "one_scan_lrpe", "two_scans", "two_decay_scans", "softmax", "copy")


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    tokens: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Sequence lengths."""
    batch_size: int = 4
    """Sequences per call."""
    num_heads: int = 6
    """Number of heads."""
    head_dim: int = 64
    """Width of a head."""
    gradients: bool = True
    """Also measure forward and backward."""


def angles_of(q: Tensor) -> Angles:
    """Compute LRPE's angles for q at the initial frequencies."""
    theta = lrpe_frequencies(q.shape[-1], axes=1).repeat(q.shape[2], 1).to(q.device)
    return lrpe_angles((q.shape[1],), theta)


def one_scan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return additive_decay(q, k, v)[0]


def one_scan_lrpe(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return additive_decay(q, k, v, angles=angles_of(q))[0]


def two_scans(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scan in both directions with the causal op."""
    forward = additive_decay(q, k, v, causal=True)[0]
    backward = additive_decay(q.flip(1), k.flip(1), v.flip(1), causal=True)[0]
    return forward + backward.flip(1)


def two_decay_scans(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scan in both directions with one fixed decay per head."""
    log_decay = logsigmoid(retnet_logits(q.shape[2])).to(q.device, q.dtype)
    both = ((q, k, v), (q.flip(1), k.flip(1), v.flip(1)))
    forward, backward = (
        decay_attention(*x, log_decay, causal=True, return_state=False)[0] for x in both
    )
    return forward + backward.flip(1)


def prepare(name: str, mode: str, tokens: int, options: Options) -> Case:
    shape = (options.batch_size, tokens, options.num_heads, options.head_dim)
    inputs = [noise(options, *shape) for _ in range(3)]
    if name == "copy":
        return copy_case(inputs, mode)
    ops = {
        "one_scan": one_scan,
        "one_scan_lrpe": one_scan_lrpe,
        "two_scans": two_scans,
        "two_decay_scans": two_decay_scans,
    }
    return op_case(ops.get(name, softmax), inputs, mode, options)


def run(options: Options) -> None:
    benchmark = Benchmark(
        name="one_scan",
        candidates=CANDIDATES,
        modes=(FORWARD, BACKWARD) if options.gradients else (FORWARD,),
        sizes=options.tokens,
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
