"""What contestants that are ops share: inputs, gradients, and what must be read and written."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from onescan.bench.contest.machine import device_of
from onescan.bench.contest.trial import BOTH_WAYS, FORWARD, RefusalError, Trial
from onescan.bench.contests import ContestOptions


def works(options: ContestOptions) -> tuple[str, ...]:
    """Forward, and with gradients if they are asked for."""
    return (FORWARD, BOTH_WAYS) if options.gradients else (FORWARD,)


def noise(options: ContestOptions, *size: int) -> Tensor:
    """Normal noise, of the type and on the device that are asked for."""
    dtype = getattr(torch, options.dtype)
    return torch.randn(*size, device=device_of(options), dtype=dtype)


def trial(
    op: Callable[..., Tensor], inputs: Sequence[Tensor], work: str, options: ContestOptions
) -> Trial:
    """Call an op, and with gradients take those of all its inputs, for random ones of its output.

    At the least a forward reads the inputs and writes the output, which is like the third input,
    the values; a backward reads the inputs and the output's gradient and writes the inputs'.
    """
    read, like = sum(map(_bytes, inputs)), inputs[2]
    op = torch.compile(op) if options.compile else op
    if work == FORWARD:

        @torch.no_grad()
        def forward() -> object:
            return op(*inputs)

        return Trial(forward, floor_bytes=read + _bytes(like), items=_tokens(like))
    leaves = [x.requires_grad_() for x in inputs]
    gradient = torch.randn_like(like)

    def both_ways() -> object:
        return torch.autograd.grad(op(*leaves), leaves, gradient)

    return Trial(both_ways, floor_bytes=3 * read + 2 * _bytes(like), items=_tokens(like))


def softmax(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Torch's attention, in whatever way torch chooses; [B, T, H, K] as ours."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def flipped(x: Tensor) -> Tensor:
    """The last token first."""
    return x.flip(1)


def theirs(module: str, options: ContestOptions) -> Any:
    """A module of flash-linear-attention.

    Raises:
        RefusalError: a GPU is not asked for, and its kernels run on nothing else; or it is not
            installed.
    """
    if device_of(options).type != "cuda":
        raise RefusalError("flash-linear-attention needs a GPU")
    return imported(module, "flash-linear-attention")


def imported(module: str, package: str) -> Any:
    """A module of another library.

    Args:
        module: as it is imported.
        package: as it is installed.

    Raises:
        RefusalError: it is not installed.
        ImportError: it is, and cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # something that it needs itself
        raise RefusalError(f"{package} is not installed: pip install {package}") from error


def _tokens(v: Tensor) -> int:
    return v.shape[0] * v.shape[1]


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
