"""MD-LRPE in Triton, forward and backward; kernels in `onescan.kernels.lrpe`.

Source: LightNet, arXiv:2405.21022, App. A.2 and App. B.
"""

from typing import Any

import torch
from torch import Tensor

from onescan.kernels import lrpe as kernels
from onescan.ops.launch import launch, programs_wanted
from onescan.shapes import Angles, Keys, RotatedKeys


def forward(x: Keys, angles: Angles) -> RotatedKeys:
    """The rotation, with gradients once: theirs have none."""
    return _rotate(x.contiguous(), angles.float().contiguous())


@torch.library.custom_op("onescan::lrpe", mutates_args=())
def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    y = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
    parts, programs = _grid(x, angles)
    sizes = (x.shape[0], angles.numel(), parts)
    constants = {"K": x.shape[-1], "BLOCK": kernels.BLOCKS.keys}
    launch(kernels.rotate, (programs,), kernels.BLOCKS, x, angles, y, *sizes, **constants)
    return y


@_rotate.register_fake
def _(x: Tensor, angles: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1])


@torch.library.custom_op("onescan::lrpe_backward", mutates_args=())
def _rotate_backward(dy: Tensor, x: Tensor, angles: Tensor, turns: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and, where it turns, of angles."""
    dx = torch.empty_like(x)
    parts, programs = _grid(x, angles)
    dangles = angles.new_empty(parts, *angles.shape) if turns else angles.new_empty(1, 0)
    sizes = (x.shape[0], angles.numel(), parts)
    constants = {"K": x.shape[-1], "ANGLES": turns, "BLOCK": kernels.BLOCKS.keys}
    tensors = (dy, x, angles, dx, dangles)
    launch(kernels.rotate_back, (programs,), kernels.BLOCKS, *tensors, *sizes, **constants)
    return dx, dangles.sum(0)


@_rotate_backward.register_fake
def _(dy: Tensor, x: Tensor, angles: Tensor, turns: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(angles) if turns else angles.new_empty(0)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    x, angles = ctx.saved_tensors
    turns = ctx.needs_input_grad[1]
    dx, dangles = _rotate_backward(dy.contiguous(), x, angles, turns)
    return dx, dangles if turns else None


_rotate.register_autograd(_backward, setup_context=_keep_for_backward)


def _grid(x: Tensor, angles: Tensor) -> tuple[int, int]:
    """Parts that the samples are dealt to, and programs."""
    blocks = max(1, -(-angles.numel() // kernels.BLOCKS.keys))
    parts = max(1, min(x.shape[0], -(-programs_wanted(x.device) // blocks)))
    return parts, parts * blocks
