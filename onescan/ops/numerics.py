"""Numbers that stay finite: the precision sums are taken in, and a logarithm of zero."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# A finite stand-in for log 0. The difference of two of them is 0 and not NaN, so an empty sum,
# a masked token or a fully masked row needs no special case, and gradients stay finite too.
LOG_ZERO = -1e30


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type sums are taken in: float32, or float64 for float64 inputs.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the one type that their sums are taken in."""
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)
    return tuple(x.to(dtype) for x in tensors)


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast does not narrow the sums over x."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device):  # the meta device has none
        return nullcontext()
    return torch.autocast(device, enabled=False)
