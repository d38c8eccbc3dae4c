"""Numerical helpers: dtypes of sums, safe division, and sums of exponentials."""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from onescan.checks import is_plain

# A finite substitute for log 0. The difference of two of them is 0 instead of NaN, so an empty sum,
# a masked token or a fully masked row needs no special case, and gradients stay finite.
LOG_ZERO = -1e30

SUM_BLOCK = 64  # tokens that `logcumsumexp` sums one after another in its derivatives

MIN_DIVISOR = 1e-30  # smaller divisors are replaced by 1, because their square is 0 in float32


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64 inputs.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def to_accumulation_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors to one common dtype for sums: float32, or float64 if any is float64."""
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)
    return tuple(x.to(dtype) for x in tensors)


def zero_masked(keep: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Set all tokens of tensors [B, T, ...] to zero except the real ones, even if they are NaN.

    Ops call it before they compute anything from their inputs: the gradient of a function at NaN is
    NaN even if its result is replaced later.

    >>> zero_masked(torch.tensor([[True, False]]), torch.tensor([[3.0, torch.nan]]))
    (tensor([[3., 0.]]),)
    """
    return tuple(x.masked_fill(~keep.view(*keep.shape, *(1,) * (x.ndim - 2)), 0) for x in tensors)


def product_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which plain torch multiplies inputs: bfloat16, or that of sums.

    bfloat16 inputs are multiplied in bfloat16, except on CPUs, many of which emulate it. All others
    are multiplied in the dtype of sums, because sums over tokens may overflow float16.
    """
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    narrow = dtype == torch.bfloat16 and tensors[0].device.type != "cpu"
    return dtype if narrow else accumulation_dtype(dtype)


def to_float64(x: Tensor) -> Tensor:
    """Convert a tensor to float64, except on MPS, which does not support it."""
    return x if x.device.type == "mps" else x.double()


def wrap_angle(angle: Tensor) -> Tensor:
    """Reduce angles in radians to [-pi, pi]; the gradient is 1.

    >>> wrap_angle(torch.tensor([1.0, 2 * math.pi + 0.5])).tolist()
    [1.0, 0.5]
    """
    periods = (angle.detach() / (2 * math.pi)).round()
    return angle.sub(periods, alpha=2 * math.pi)


def safe_divide(x: Tensor, y: Tensor, *, overwrite: bool = False) -> Tensor:
    """Divide x by y, or by 1 where y is almost 0, so that gradients stay finite.

    Args:
        x: Dividend.
        y: Divisor, in a shape that broadcasts to that of x.
        overwrite: As in `broadcast_divide`.

    >>> safe_divide(torch.tensor([6.0, 0.0]), torch.tensor([3.0, 1e-40])).tolist()
    [2.0, 0.0]
    """
    return broadcast_divide(x, torch.where(y.abs() < MIN_DIVISOR, 1, y), overwrite=overwrite)


def broadcast_divide(x: Tensor, y: Tensor, *, overwrite: bool = False) -> Tensor:
    """Divide x by y, with a gradient that reads x half as often as that of ``x / y``.

    Args:
        x: Dividend.
        y: Divisor, in a shape that broadcasts to that of x.
        overwrite: Allow overwriting x, which saves memory if no derivatives are needed.

    >>> broadcast_divide(torch.tensor([6.0, 9.0]), torch.tensor([3.0])).tolist()
    [2.0, 3.0]
    """
    if torch.compiler.is_compiling():
        return x / y
    if overwrite and not needs_derivatives(x, y):
        return x.div_(y)
    return apply_function(_BroadcastDivide, x, y)


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Compute dot products along the last axis, which is kept, without storing the products.

    >>> row_dot(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])).tolist()
    [11.0]
    """
    return (x.unsqueeze(-2) @ y.unsqueeze(-1)).squeeze(-1)


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call function.apply, or only its forward, which is faster, if no derivatives are needed.

    >>> apply_function(_BroadcastDivide, torch.tensor([6.0, 9.0]), torch.tensor([3.0])).tolist()
    [2.0, 3.0]
    """
    if needs_derivatives(*(x for x in arguments if isinstance(x, Tensor))):
        return function.apply(*arguments)
    return function.forward(*arguments)


def needs_derivatives(*tensors: Tensor) -> bool:
    """Return whether derivatives of a function of these tensors may be requested.

    >>> needs_derivatives(torch.ones(1)), needs_derivatives(torch.ones(1, requires_grad=True))
    (False, True)
    """
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    # forward-mode derivatives and torch.func do not set requires_grad
    return has_gradient or forward_ad._current_level >= 0 or not all(map(is_plain, tensors))


def differentiable_gradients(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: tuple[Tensor | None, ...],
    gradients: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    """Return gradients of a function of plain operations; they are differentiable themselves."""
    differentiable = [x for x in inputs if x is not None and x.requires_grad]
    pairs = zip(function(*inputs), gradients, strict=True)
    outputs, output_gradients = zip(
        *[(x, gradient) for x, gradient in pairs if x.requires_grad], strict=True
    )
    input_gradients = iter(
        torch.autograd.grad(outputs, differentiable, output_gradients, create_graph=True)
    )
    return tuple(
        next(input_gradients) if x is not None and x.requires_grad else None for x in inputs
    )


def logcumsumexp(x: Tensor) -> Tensor:
    """Compute log sum_{s <= t} exp(x_s) along the second-to-last axis, for finite x.

    Unlike torch.logcumsumexp, its gradient is fast, and its second derivatives are not NaN.
    """
    if torch.compiler.is_compiling():  # compilers cannot trace a function with a jvp
        return _LogCumSumExp.apply(x)
    return apply_function(_LogCumSumExpForwardMode, x)


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """Compute log(exp(a) + exp(b)), for finite a and b, including `LOG_ZERO`.

    Unlike those of torch.logaddexp, its second derivatives are not NaN.
    """
    if torch.compiler.is_compiling():
        return _LogAddExp.apply(a, b)
    return apply_function(_LogAddExpForwardMode, a, b)


class _BroadcastDivide(torch.autograd.Function):
    """Compute z = x / y, with dx = dz / y and dy = -sum x dx / y."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x / y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, y = ctx.saved_tensors
        is_row = y.shape == (*x.shape[:-1], 1)
        if is_row and x.is_contiguous():
            gradient = gradient.contiguous()
        dx, dy = gradient / y, None
        if ctx.needs_input_grad[1]:
            with disable_autocast(x):
                dy = -(row_dot(x, dx) if is_row else (x * dx).sum_to_size(y.shape)) / y
        return dx, dy

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dy: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return (dx - x / y * dy) / y


class _LogAddExp(torch.autograd.Function):
    """Compute z = log(exp(a) + exp(b)), with dz/da = exp(a - z) and dz/db = exp(b - z)."""

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


class _LogAddExpForwardMode(_LogAddExp):
    """Add forward-mode derivatives."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        _LogAddExp.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def jvp(ctx: Any, da: Tensor, db: Tensor) -> Tensor:
        a, b, z = ctx.saved_tensors
        return (a - z).exp() * da + (b - z).exp() * db


class _LogCumSumExp(torch.autograd.Function):
    """Compute z_t = log sum_{s <= t} exp(x_s), with dz_t/dx_s = exp(x_s - z_t).

    dx_s = exp(x_s - z_s) G_s with G_s = sum_{t >= s} dz_t exp(z_s - z_t). G is computed from the
    last token to the first as G_s = dz_s + exp(z_s - z_{s+1}) G_{s+1}, which cannot overflow
    because z never decreases. The forward-mode derivative is computed from the first to the last.
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
        decay = F.pad((z[..., :-1, :] - z[..., 1:, :]).exp_(), (0, 0, 0, 1))
        return (x - z).exp_() * _decayed_sums(gradient, decay, backward=True)


class _LogCumSumExpForwardMode(_LogCumSumExp):
    """Add forward-mode derivatives."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        _LogCumSumExp.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        x, z = ctx.saved_tensors
        decay = F.pad((z[..., :-1, :] - z[..., 1:, :]).exp_(), (0, 0, 1, 0))
        return _decayed_sums((x - z).exp_() * dx, decay, backward=False)


def _decayed_sums(x: Tensor, decay: Tensor, *, backward: bool) -> Tensor:
    """Compute y_t = x_t + decay_t y_{t-1} along the second-to-last axis, or y_{t+1} if backward.

    The first token visited has y = x. For the others, the number of steps is reduced from T to
    about 2 sqrt(T): a step visits one token of each block, first to compute the sum of each block
    alone, and, once these are summed over the blocks, again to add the sum of the blocks before it.
    """
    tokens, order = x.shape[-2], -1 if backward else 1
    size = min(tokens, SUM_BLOCK)
    count = -(-tokens // size)
    if padding := count * size - tokens:
        x, decay = (F.pad(part, (0, 0, 0, padding)) for part in (x, decay))
    in_blocks = (part.unflatten(-2, (count, size)).unbind(-2) for part in (x, decay))
    steps = list(zip(*in_blocks, strict=True))[::order]
    y = torch.zeros_like(steps[0][0])
    if count > 1:
        factor = torch.ones_like(y)
        for added, decayed in steps:
            y, factor = torch.addcmul(added, decayed, y), decayed * factor
        y = _decayed_sums(y, factor, backward=backward)
        before = (0, 0, 0, 1) if backward else (0, 0, 1, 0)
        y = F.pad(y[..., 1:, :] if backward else y[..., :-1, :], before)
    sums: list[Tensor] = []
    for added, decayed in steps:
        y = torch.addcmul(added, decayed, y)
        sums.append(y)
    return torch.stack(sums[::order], dim=-2).flatten(-3, -2)[..., :tokens, :]


def disable_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast is disabled on the device of x."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device):  # not on the meta device
        return nullcontext()
    return torch.autocast(device, enabled=False)


def is_autocast_enabled(x: Tensor) -> bool:
    """Return whether autocast is enabled for the device of x."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Convert the input of several layers as autocast would for each of them; x if disabled.

    >>> to_autocast_dtype(torch.ones(1)).dtype
    torch.float32
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     to_autocast_dtype(torch.ones(1)).dtype
    torch.bfloat16
    """
    if not is_autocast_enabled(x) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
