"""Bidirectional attention with decay that depends on the token, compared with softmax attention.

As in LION, arXiv:2502.16249. flash-linear-attention's causal kernels run in both directions, in two
calls or on a doubled batch. "delta_rule" is Gated DeltaNet in both directions, or KDA with diagonal
decay. "copy" copies as many bytes as an op must read and write at least.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import harness
import one_scan
import torch
from benchmark_cases import copy_case, import_fla, noise, op_case, softmax
from harness import BACKWARD, FORWARD, Case, run_benchmark
from results import Benchmark
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from onescan.ops import decay_attention, delta_rule

FORMS = ("auto", "chunk", "full")
FLA = ("fla_two_calls", "fla_doubled_batch")
LOGIT = 2.0  # of the mean decay factor, sigmoid(2) = 0.88


@dataclass(frozen=True, kw_only=True)
class Options(one_scan.Options):
    """Options of the benchmark."""

    decay: Literal["scalar", "diagonal"] = "scalar"
    """One decay per head (scalar), or one per key channel (diagonal)."""
    normalize: Literal["none", "sum"] = "sum"
    """How onescan normalizes; LION divides by the sum, flash-linear-attention does not divide."""
    chunk_size: int = 64
    """Tokens per chunk of onescan's chunk form."""


def prepare(name: str, mode: str, tokens: int, options: Options) -> Case:
    shape = (options.batch_size, tokens, options.num_heads, options.head_dim)
    q, k, v = (noise(options, *shape) for _ in range(3))
    q, k = q.sigmoid(), k.sigmoid()
    decay_shape = shape if options.decay == "diagonal" else shape[:-1]
    log_decay = logsigmoid(noise(options, *decay_shape) + LOGIT)
    if name == "softmax":
        return op_case(softmax, (q, k, v), mode, options)
    if name == "copy":
        return copy_case((q, k, v, log_decay), mode)
    if name == "delta_rule":
        beta = noise(options, *shape[:-1]).sigmoid()
        return op_case(
            delta_rule_output, (q, normalize(k, dim=-1), v, beta, log_decay), mode, options
        )
    op = fla_op(name, options) if name in FLA else our_op(name, options)
    return op_case(op, (q, k, v, log_decay), mode, options)


def delta_rule_output(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    return delta_rule(q, k, v, beta, log_decay)[0]


def our_op(form: str, options: Options) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return decay_attention(
            q,
            k,
            v,
            log_decay,
            normalize=options.normalize,
            form=form,
            chunk_size=options.chunk_size,
            return_state=False,
        )[0]

    return attend


def fla_op(name: str, options: Options) -> Callable[..., Tensor]:
    """Attend in both directions with flash-linear-attention's causal kernel."""
    module = "gla" if options.decay == "diagonal" else "simple_gla"
    kernel = getattr(import_fla(f"fla.ops.{module}", options), f"chunk_{module}")

    def two_calls(*inputs: Tensor) -> Tensor:
        backward = kernel(*(x.flip(1) for x in inputs), scale=1.0)[0]
        return kernel(*inputs, scale=1.0)[0] + backward.flip(1)

    def doubled_batch(*inputs: Tensor) -> Tensor:
        both = kernel(*(torch.cat((x, x.flip(1))) for x in inputs), scale=1.0)[0]
        forward, backward = both.chunk(2)
        return forward + backward.flip(1)

    return two_calls if name == "fla_two_calls" else doubled_batch


def run(options: Options) -> None:
    benchmark = Benchmark(
        name="decay",
        candidates=(*FORMS, "delta_rule", "softmax", *FLA, "copy"),
        modes=(FORWARD, BACKWARD) if options.gradients else (FORWARD,),
        sizes=options.tokens,
    )
    run_benchmark(benchmark, prepare, options)


if __name__ == "__main__":
    harness.main(Options, run, __doc__)
