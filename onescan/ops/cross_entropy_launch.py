"""Launch the kernels of cross-entropy, forward and backward (`onescan.kernels.cross_entropy`)."""

from typing import Any

import torch
from torch import Tensor

from onescan.kernels import cross_entropy as kernels
from onescan.kernels.common import Case
from onescan.ops.backend import chip_of, launch, name_of


def losses(logits: Tensor, labels: Tensor, *, ignored: int) -> Tensor:
    """Return the loss of each row in float32, 0 where ignored, with first derivatives only."""
    loss, *_ = _losses(logits.contiguous(), labels.contiguous(), ignored)
    return loss


@torch.library.custom_op("onescan::cross_entropy", mutates_args=())
def _losses(
    logits: Tensor, labels: Tensor, ignored: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return losses, the largest logits, and sums of exponentials relative to them, all [N]."""
    loss = logits.new_empty(len(logits), dtype=torch.float32)
    peak, mass = torch.empty_like(loss), torch.empty_like(loss)
    if len(logits):
        classes = logits.shape[1]
        tensors = (logits, labels, loss, peak, mass)
        launch(kernels.losses, _case(logits), loss.shape, *tensors, classes, ignored)
    return loss, peak, mass


@_losses.register_fake
def _(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, ...]:
    loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return loss, torch.empty_like(loss), torch.empty_like(loss)


@torch.library.custom_op("onescan::cross_entropy_backward", mutates_args=())
def _losses_backward(
    dloss: Tensor, logits: Tensor, labels: Tensor, peak: Tensor, mass: Tensor, ignored: int
) -> Tensor:  # fmt: skip
    dlogits = torch.empty_like(logits)
    case, (rows, classes) = _case(logits), logits.shape
    if rows:
        grid = (rows, -(-classes // kernels.blocks_of(case).keys))
        tensors = (dloss, logits, labels, peak, mass, dlogits)
        launch(kernels.losses_back, case, grid, *tensors, classes, ignored)
    return dlogits


@_losses_backward.register_fake
def _(
    dloss: Tensor, logits: Tensor, labels: Tensor, peak: Tensor, mass: Tensor, ignored: int
) -> Tensor:  # fmt: skip
    return torch.empty_like(logits)


def _case(logits: Tensor) -> Case:
    return Case(name_of(logits.dtype), chip_of(logits.device))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.ignored = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
    dlogits = _losses_backward(dloss.contiguous(), *ctx.saved_tensors, ctx.ignored)
    return dlogits, None, None


_losses.register_autograd(_backward, setup_context=_save_for_backward)
