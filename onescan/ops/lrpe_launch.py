"""Launch MD-LRPE's kernels, forward and backward (`onescan.kernels.lrpe`).

Source: LightNet, arXiv:2405.21022, App. A.2 and App. B.
"""

from typing import Any

import torch
from torch import Tensor

from onescan.kernels import lrpe as kernels
from onescan.kernels.common import Case
from onescan.ops.backend import chip_of, launch, name_of, target_programs
from onescan.shapes import Angles, Keys, RotatedKeys


def forward(x: Keys, angles: Angles) -> RotatedKeys:
    """Rotate x, with first derivatives only."""
    return _rotate(x.contiguous(), angles.float().contiguous())


def rotary_table(angles: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute cosines and sines [T, H, 2, K], in fp16 unless the data is float32."""
    tokens, heads, width = angles.shape
    narrow = torch.float32 if dtype is torch.float32 else torch.float16
    table = angles.new_empty(tokens, heads, 2, width, dtype=narrow)
    case, blocks = _case(angles)
    launch(kernels.tabulate, case, (blocks,), angles.contiguous(), table, angles.numel())
    return table


@torch.library.custom_op("onescan::lrpe", mutates_args=())
def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    y = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
    case, blocks = _case(angles)
    parts = _parts(x, blocks)
    launch(kernels.rotate, case, (parts * blocks,), x, angles, y, x.shape[0], angles.numel(), parts)
    return y


@_rotate.register_fake
def _(x: Tensor, angles: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1])


@torch.library.custom_op("onescan::lrpe_backward", mutates_args=())
def _rotate_backward(
    dy: Tensor, x: Tensor, angles: Tensor, wants_dangles: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and, if needed, of angles."""
    dx = torch.empty_like(x)
    case, blocks = _case(angles)
    parts = _parts(x, blocks)
    dangles = angles.new_empty(parts, *angles.shape) if wants_dangles else None
    launch(
        kernels.rotate_back, case, (parts * blocks,),
        dy, x, angles, dx, dangles, x.shape[0], angles.numel(), parts,
    )  # fmt: skip
    return dx, angles.new_empty(0) if dangles is None else dangles.sum(0)


@_rotate_backward.register_fake
def _(dy: Tensor, x: Tensor, angles: Tensor, wants_dangles: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(angles) if wants_dangles else angles.new_empty(0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    wants_dangles = ctx.needs_input_grad[1]
    dx, dangles = _rotate_backward(dy.contiguous(), *ctx.saved_tensors, wants_dangles)
    return dx, dangles if wants_dangles else None


_rotate.register_autograd(_backward, setup_context=_save_for_backward)


def _case(angles: Tensor) -> tuple[Case, int]:
    """Return the compile-time parameters and the number of blocks of angles."""
    case = Case(name_of(angles.dtype), chip_of(angles.device), key_width=angles.shape[-1])
    return case, max(1, -(-angles.numel() // kernels.blocks_of(case).keys))


def _parts(x: Tensor, blocks: int) -> int:
    """Return the number of parts that the samples are divided into."""
    return max(1, min(x.shape[0], -(-target_programs(x.device) // blocks)))
