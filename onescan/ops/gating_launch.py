"""Launch the kernels of gates, forward and backward (`onescan.kernels.gating`)."""

from typing import Any

import torch
from torch import Tensor

from onescan.kernels import gating as kernels
from onescan.kernels.common import Case
from onescan.ops.backend import chip_of, data_type, launch, name_of


def gated(x: Tensor, gate: Tensor, *, is_silu: bool) -> Tensor:
    """Compute `onescan.ops.gating.gated`, with first derivatives only."""
    dtype = data_type(x, gate)
    return _gated(x.to(dtype).contiguous(), gate.to(dtype).contiguous(), is_silu)


@torch.library.custom_op("onescan::gated", mutates_args=())
def _gated(x: Tensor, gate: Tensor, is_silu: bool) -> Tensor:
    y = torch.empty_like(x)
    _launch(kernels.gated, is_silu, x, gate, y)
    return y


@_gated.register_fake
def _(x: Tensor, gate: Tensor, is_silu: bool) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("onescan::gated_backward", mutates_args=())
def _gated_backward(
    dy: Tensor, x: Tensor, gate: Tensor, is_silu: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    _launch(kernels.gated_backward, is_silu, dy, x, gate, dx, dgate)
    return dx, dgate


@_gated_backward.register_fake
def _(dy: Tensor, x: Tensor, gate: Tensor, is_silu: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gate)


def _launch(kernel: Any, is_silu: bool, x: Tensor, *tensors: Tensor) -> None:
    case = Case(name_of(x.dtype), chip_of(x.device))
    grid = (max(1, -(-x.numel() // kernel.blocks(case).keys)),)
    launch(kernel, case, grid, x, *tensors, x.numel(), SILU=is_silu)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.is_silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_gated_backward(dy.contiguous(), *ctx.saved_tensors, ctx.is_silu), None


_gated.register_autograd(_backward, setup_context=_save_for_backward)
