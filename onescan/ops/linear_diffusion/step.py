"""A step in time from products with the kernel, head by head.

Source: LDN, arXiv:2502.12381, Sec. 3.3 (both schemes) and 4.4 (the step as a mean of tokens).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.checks import can_look_at_values
from onescan.ops.linear_diffusion import banded
from onescan.ops.linear_diffusion.implicit import Solve
from onescan.ops.numerics import doubled
from onescan.shapes import (
    DiffusionKernel,
    DiffusionKernels,
    Keep,
    Moved,
    MovedColumns,
    TokenColumns,
    Values,
)

Product = Callable[[TokenColumns, DiffusionKernel, int], MovedColumns]  # the last rows of K x


def explicit(
    product: Product, x: Values, share: DiffusionKernels, keep: Keep | None, rows: int
) -> Moved:
    """The mean h' = (1 - dt K 1) h + dt K h, for the last rows; `share` is dt K."""
    row_sums = _row_sums(product, share, keep, rows)
    moved, own = _products(product, x, share, rows), x[:, -rows:]
    if torch.compiler.is_compiling():  # which cannot trace a function with a jvp
        return torch.addcmul(moved, 1 - row_sums, own)
    if can_look_at_values(moved) and not moved.requires_grad:
        # in place, as on a CPU memory for another result would take as long as a product
        return moved.addcmul_(1 - row_sums, own)
    return _Mean.apply(moved, 1 - row_sums, own)


def crank_nicolson(solve: Solve, x: Values, share: DiffusionKernels, keep: Keep | None) -> Values:
    """The step h' = 2 (I - dt/2 L)^-1 h - h, which is (I - dt/2 L)^-1 (I + dt/2 L) h.

    A step of n times the stable one costs the digits of n, so all of it is in float64.
    """
    wide_x, half = doubled(x), doubled(share) / 2
    row_sums = _row_sums(banded.product, half, keep, x.shape[1]).squeeze(3)
    heads = []
    for head, kernel, sums in zip(_heads(wide_x), half, row_sums.unbind(2), strict=True):  # B T V
        if keep is not None:
            heads.append(solve(head, kernel, sums, keep))
            continue
        moved = solve(_columns(head).unsqueeze(0), kernel, sums, None)  # one system for all
        heads.append(moved[0].unflatten(1, (head.shape[0], head.shape[2])).transpose(0, 1))
    return (2 * torch.stack(heads, dim=2) - wide_x).to(x.dtype)


def _products(product: Product, x: Values, weights: DiffusionKernels, rows: int) -> Moved:
    """Each head's tokens, multiplied by its kernel."""
    heads = [
        product(_columns(head), kernel, rows).unflatten(1, (x.shape[0], x.shape[3]))
        for head, kernel in zip(_heads(x), weights, strict=True)
    ]
    together = heads[0].unsqueeze(2) if len(heads) == 1 else torch.stack(heads, dim=2)
    return together.transpose(0, 1)


def _heads(x: Values) -> Sequence[Tensor]:
    """Each head's tokens, [B, T, V]; the gradient of a single one needs no memory of its own."""
    return [x.squeeze(2)] if x.shape[2] == 1 else x.unbind(2)


def _columns(head: Tensor) -> TokenColumns:
    """[B, T, V] to [T, B V]: one matrix product for all sequences."""
    return head.transpose(0, 1).flatten(1)


def _row_sums(product: Product, weights: DiffusionKernels, keep: Keep | None, rows: int) -> Tensor:
    """sum_s K_ts for the last rows, over real tokens: [1 or B, rows, H, 1]."""
    if keep is not None:
        ones = keep.to(weights.dtype)[:, :, None, None].expand(-1, -1, weights.shape[0], 1)
        return _products(product, ones, weights, rows)
    radius = weights.shape[1] // 2
    t = torch.arange(rows, device=weights.device)
    ahead = F.pad(weights[:, :radius].flip(1).cumsum(1), (1, 0))  # of 0, 1, ... R lags
    behind = F.pad(weights[:, radius + 1 :].cumsum(1), (1, 0))
    row_sums = behind[:, t.clamp(max=radius)] + ahead[:, (rows - 1 - t).clamp(max=radius)]
    return row_sums.mT[None, :, :, None]


class _Mean(torch.autograd.Function):
    """torch.addcmul(moved, kept, own), and d kept without all of dy * own in memory."""

    generate_vmap_rule = True

    @staticmethod
    def forward(moved: Tensor, kept: Tensor, own: Tensor) -> Tensor:
        return torch.addcmul(moved, kept, own)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def jvp(ctx: Any, dmoved: Tensor, dkept: Tensor, down: Tensor) -> Tensor:
        kept, own = ctx.saved_tensors
        return dmoved + dkept * own + kept * down

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept, own = ctx.saved_tensors
        dots = (gradient.unsqueeze(-2) @ own.unsqueeze(-1)).squeeze(-1)  # B rows H 1
        return gradient, dots.sum_to_size(kept.shape), gradient * kept
