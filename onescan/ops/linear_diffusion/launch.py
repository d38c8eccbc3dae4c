"""Launch the kernels of the explicit step, forward and backward (`onescan.kernels.diffusion`).

Source: LDN, arXiv:2502.12381, Sec. 3.3.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.kernels import diffusion as kernels
from onescan.kernels.common import Case
from onescan.ops.backend import chip_of, launch, name_of, target_programs
from onescan.shapes import AllTokens, DiffusionKernels, Keep, LastTokens


def explicit(
    x: AllTokens, rates: DiffusionKernels, keep: Keep | None, sequence: Tensor | None, rows: int
) -> LastTokens:
    """Compute the explicit step for the last `rows` tokens, with first derivatives only.

    Args:
        x: The tokens, in the dtype of the result. Masked ones are not read.
        rates: dt K, 0 for lag 0.
        keep: True for real tokens; the results of the others are zero.
        sequence: Index of the sequence of each token, [B, T]. Only tokens of the same one mix.
        rows: Number of tokens to compute.
    """
    masks = (None if mask is None else mask.contiguous() for mask in (keep, sequence))
    return _diffusion(x.contiguous(), rates.float().contiguous(), *masks, rows)


@torch.library.custom_op("onescan::diffusion", mutates_args=())
def _diffusion(
    x: Tensor, rates: Tensor, keep: Tensor | None, sequence: Tensor | None, rows: int
) -> Tensor:
    y = x.new_empty(x.shape[0], rows, *x.shape[2:])
    _step(x, rates, keep, sequence, y, tokens=x.shape[1], length=rows, transposed=False)
    return y


@_diffusion.register_fake
def _(
    x: Tensor, rates: Tensor, keep: Tensor | None, sequence: Tensor | None, rows: int
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], rows, *x.shape[2:])


@torch.library.custom_op("onescan::diffusion_backward", mutates_args=())
def _diffusion_backward(
    dy: Tensor, x: Tensor, rates: Tensor, keep: Tensor | None, sequence: Tensor | None,
    wants_dx: bool, wants_drates: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of x and rates, those that are needed."""
    dx, drates = x.new_empty(0), rates.new_empty(0)
    tokens, length = x.shape[1], dy.shape[1]
    if wants_dx:
        dx = torch.empty_like(x)
        _step(dy, rates, keep, sequence, dx, tokens=tokens, length=length, transposed=True)
    if wants_drates:
        drates = _rates_gradient(dy, x, rates, keep, sequence)
    return dx, drates


@_diffusion_backward.register_fake
def _(
    dy: Tensor, x: Tensor, rates: Tensor, keep: Tensor | None, sequence: Tensor | None,
    wants_dx: bool, wants_drates: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx = torch.empty_like(x) if wants_dx else x.new_empty(0)
    return dx, torch.empty_like(rates) if wants_drates else rates.new_empty(0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    wants_dx, wants_drates = ctx.needs_input_grad[:2]
    dx, drates = _diffusion_backward(dy.contiguous(), *ctx.saved_tensors, wants_dx, wants_drates)
    return dx if wants_dx else None, drates if wants_drates else None, None, None, None


_diffusion.register_autograd(_backward, setup_context=_save_for_backward)


def _step(
    x: Tensor, rates: Tensor, keep: Tensor | None, sequence: Tensor | None, y: Tensor, *,
    tokens: int, length: int, transposed: bool,
) -> None:  # fmt: skip
    case = _case(x)
    blocks = kernels.step_blocks(case)
    batch, rows, heads, width = y.shape
    programs = batch * -(-rows // blocks.tokens) * heads * -(-width // blocks.values)
    if programs:
        launch(
            kernels.step, case, (programs,),
            x, rates, keep, sequence, y, tokens, length, rates.shape[1] // 2, TRANSPOSED=transposed,
        )  # fmt: skip


def _rates_gradient(
    dy: Tensor, x: Tensor, rates: Tensor, keep: Tensor | None, sequence: Tensor | None
) -> Tensor:
    case = _case(x)
    size = kernels.gradient_blocks(case).tokens
    batch, tokens, heads, _ = x.shape
    length, middle = dy.shape[1], rates.shape[1] // 2
    radius = min(middle, tokens - 1)  # longer lags connect no tokens
    programs = heads * -(-(size + 2 * radius) // size)  # per part
    parts = max(1, min(batch * -(-length // size), target_programs(x.device) // programs))
    terms = rates.new_empty(parts, heads, size, 2 * radius + 1)
    launch(
        kernels.rates_gradient, case, (parts * programs,),
        dy, x, keep, sequence, terms, batch, tokens, length, radius, parts,
    )  # fmt: skip
    drates = terms.sum((0, 2))
    return drates if radius == middle else F.pad(drates, (middle - radius, middle - radius))


def _case(x: Tensor) -> Case:
    heads, width = x.shape[2:]
    return Case(name_of(x.dtype), chip_of(x.device), heads, value_width=width)
