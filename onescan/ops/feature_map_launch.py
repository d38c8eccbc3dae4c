"""Launch the kernels of feature maps, forward and backward (`onescan.kernels.feature_maps`)."""

from typing import Any

import torch
from torch import Tensor

from onescan.kernels import feature_maps as kernels
from onescan.ops.backend import case_of, launch, packed_heads, token_stride
from onescan.shapes import Queries


def shifted_silu(x: Queries) -> Queries:
    """Compute `onescan.ops.feature_maps.shifted_silu`, with first derivatives only."""
    return _shifted_silu(packed_heads(x))


@torch.library.custom_op("onescan::shifted_silu", mutates_args=())
def _shifted_silu(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    _launch(kernels.shifted_silu, x, x, y)
    return y


@_shifted_silu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("onescan::shifted_silu_backward", mutates_args=())
def _shifted_silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dx = x.new_empty(x.shape)
    _launch(kernels.shifted_silu_backward, x, dy, x, dx)
    return dx


@_shifted_silu_backward.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _launch(kernel: Any, x: Tensor, *tensors: Tensor) -> None:
    case = case_of(x, x)
    lines = x.shape[:3].numel()
    grid = (max(1, -(-lines // kernel.blocks(case).tokens)),)
    launch(kernel, case, grid, *tensors, lines, token_stride(x))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return _shifted_silu_backward(dy.contiguous(), *ctx.saved_tensors)


_shifted_silu.register_autograd(_backward, setup_context=_save_for_backward)
