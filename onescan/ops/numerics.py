"""Numbers that stay finite and exact: types of sums, quotients, a logarithm of zero."""

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onescan.checks import is_plain

# A finite stand-in for log 0. The difference of two of them is 0 and not NaN, so an empty sum,
# a masked token or a fully masked row needs no special case, and gradients stay finite too.
LOG_ZERO = -1e30

LEAST_WEIGHT = 1e-30  # the square of less is 0 in float32


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


def doubled(x: Tensor) -> Tensor:
    """The tensor in float64, on devices that have it."""
    return x if x.device.type == "mps" else x.double()


def modulo_turn(angle: Tensor) -> Tensor:
    """Reduce angles in radians to [-pi, pi]; the gradient is 1.

    >>> modulo_turn(torch.tensor([1.0, 2 * math.pi + 0.5])).tolist()
    [1.0, 0.5]
    """
    turns = (angle.detach() / (2 * math.pi)).round()
    return angle.sub(turns, alpha=2 * math.pi)


def divided(sums: Tensor, weight: Tensor, *, owned: bool = False) -> Tensor:
    """Divide sums by their weight, or by 1 where that is next to nothing: gradients stay finite.

    Owned as in `quotient`.

    >>> divided(torch.tensor([6.0, 0.0]), torch.tensor([3.0, 1e-40])).tolist()
    [2.0, 0.0]
    """
    return quotient(sums, torch.where(weight.abs() < LEAST_WEIGHT, 1, weight), owned=owned)


def quotient(x: Tensor, by: Tensor, *, owned: bool = False) -> Tensor:
    """Divide x by what broadcasts to it, with a gradient of half as many passes over x.

    Args:
        x: what is divided.
        by: by what.
        owned: whether x is nobody else's: it is divided in place where that changes no derivative.

    >>> quotient(torch.tensor([6.0, 9.0]), torch.tensor([3.0])).tolist()
    [2.0, 3.0]
    """
    if torch.compiler.is_compiling():
        return x / by
    if owned and not may_be_derived(x, by):
        return x.div_(by)
    return applied(_Quotient, x, by)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Sums of products along the last axis, which is kept, without the products in memory.

    >>> inner(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])).tolist()
    [11.0]
    """
    return (x.unsqueeze(-2) @ y.unsqueeze(-1)).squeeze(-1)


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply, which takes its time, and is left out where nobody can ask for a derivative.

    >>> applied(_Quotient, torch.tensor([6.0, 9.0]), torch.tensor([3.0])).tolist()
    [2.0, 3.0]
    """
    if may_be_derived(*(x for x in arguments if isinstance(x, Tensor))):
        return function.apply(*arguments)
    return function.forward(*arguments)


def may_be_derived(*tensors: Tensor) -> bool:
    """Whether anybody can ask for a derivative of what is made of them.

    >>> may_be_derived(torch.ones(1)), may_be_derived(torch.ones(1, requires_grad=True))
    (False, True)
    """
    is_learning = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    # gradients forward are asked for in other ways, of tensors that look as all others do
    return is_learning or forward_ad._current_level >= 0 or not all(map(is_plain, tensors))


def running_logsumexp(x: Tensor) -> Tensor:
    """Take log sum_{s <= t} exp(x_s) along the last but one axis, for finite x.

    torch.logcumsumexp, with a gradient that is faster, and whose own gradient is not NaN.
    """
    return _RunningLogSumExp.apply(x)


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """Take log(exp(a) + exp(b)), for finite a and b as far apart as `LOG_ZERO` from a number.

    torch.logaddexp, whose gradient's own gradient would be NaN there.
    """
    return _LogAddExp.apply(a, b)


class _Quotient(torch.autograd.Function):
    """y = x / b, so dx = dy / b and db = -sum x dx / b."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, by: Tensor) -> Tensor:
        return x / by

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, by = ctx.saved_tensors
        is_row = by.shape == (*x.shape[:-1], 1)
        if is_row and x.is_contiguous():
            gradient = gradient.contiguous()
        dx, dby = gradient / by, None
        if ctx.needs_input_grad[1]:
            with full_precision(x):
                dby = -(inner(x, dx) if is_row else (x * dx).sum_to_size(by.shape)) / by
        return dx, dby

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dby: Tensor) -> Tensor:
        x, by = ctx.saved_tensors
        return (dx - x / by * dby) / by


class _LogAddExp(torch.autograd.Function):
    """z = log(exp(a) + exp(b)), so dz/da = exp(a - z) and dz/db = exp(b - z)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.logaddexp(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.shapes = [x.shape for x in inputs]
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        *inputs, z = ctx.saved_tensors
        gradients = (gradient * (x - z).exp() for x in inputs)
        return tuple(g.sum_to_size(s) for g, s in zip(gradients, ctx.shapes, strict=True))


class _RunningLogSumExp(torch.autograd.Function):
    """z_t = log sum_{s <= t} exp(x_s), so dz_t/dx_s = exp(x_s - z_t).

    dx_s = exp(x_s - z_s) G_s with G_s = sum_{t >= s} dz_t exp(z_s - z_t), and z never falls:
    G_s = dz_s + exp(z_s - z_{s+1}) G_{s+1}, from the last to the first.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.logcumsumexp(dim=-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, z = ctx.saved_tensors
        decay = (z[..., :-1, :] - z[..., 1:, :]).exp().unbind(-2)
        sums = list(gradient.unbind(-2))
        for s in reversed(range(len(decay))):
            sums[s] = torch.addcmul(sums[s], decay[s], sums[s + 1])
        return (x - z).exp() * torch.stack(sums, dim=-2)


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast does not narrow the sums over x."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device):  # the meta device has none
        return nullcontext()
    return torch.autocast(device, enabled=False)


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is enabled for the device of x."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
