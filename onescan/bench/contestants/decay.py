"""Bidirectional decayed attention: our forms, softmax, and causal kernels there and back."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from onescan.bench.contest.trial import Field, Trial
from onescan.bench.contestants.ops import flipped, noise, softmax, theirs, trial, works
from onescan.bench.contests import DecayOptions
from onescan.ops.decay_attention import Form, decay_attention

OURS: dict[str, Form] = {"auto": "auto", "chunk": "chunk", "full": "full"}
SOFTMAX = "softmax"
LOGIT = 2.0  # of the mean decay, sigmoid(2) = 0.88


def contestants(options: DecayOptions) -> Field:
    """Name them."""
    return Field((*OURS, SOFTMAX, *FLA), works(options), prepare)


def prepare(name: str, work: str, size: int, options: DecayOptions) -> Trial:
    """Noise through an op; softmax has no decay to read."""
    shape = (options.batch_size, size, options.num_heads, options.head_dim)
    q, k, v = (noise(options, *shape) for _ in range(3))
    q, k = q.sigmoid(), k.sigmoid()
    if name == SOFTMAX:
        return trial(softmax, (q, k, v), work, options)
    decays = shape if options.decay == "diagonal" else shape[:-1]
    inputs = (q, k, v, logsigmoid(noise(options, *decays) + LOGIT))
    if name in FLA:
        return trial(FLA[name](_causal_kernel(options)), inputs, work, options)
    return trial(_ours(OURS[name], options), inputs, work, options)


def _ours(form: Form, options: DecayOptions) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return decay_attention(
            q,
            k,
            v,
            log_decay,
            normalize=options.normalize,
            form=form,
            backend=options.backend,
            chunk_size=options.chunk_size,
            return_state=False,
        )[0]

    return attend


def _causal_kernel(options: DecayOptions) -> Callable[..., Tensor]:
    """flash-linear-attention's, for this kind of decay.

    Raises:
        RefusalError: it is not installed, or a GPU is not asked for.
    """
    name = "gla" if options.decay == "diagonal" else "simple_gla"
    kernel = getattr(theirs(f"fla.ops.{name}", options), f"chunk_{name}")
    return lambda *inputs: kernel(*inputs, scale=1.0)[0]


def _two_calls(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """There, and back on flipped tensors."""

    def attend(*inputs: Tensor) -> Tensor:
        return kernel(*inputs) + flipped(kernel(*map(flipped, inputs)))

    return attend


def _doubled_batch(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """There and back in one call, on twice as many sequences."""

    def attend(*inputs: Tensor) -> Tensor:
        there, back = kernel(*(torch.cat((x, flipped(x))) for x in inputs)).chunk(2)
        return there + flipped(back)

    return attend


FLA = {"fla_two_calls": _two_calls, "fla_doubled_batch": _doubled_batch}
