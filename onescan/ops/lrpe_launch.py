"""Launch MD-LRPE's kernels, forward and backward (`onescan.kernels.lrpe`).

Source: LightNet, arXiv:2405.21022, App. A.2 and App. B.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onescan.kernels import lrpe as kernels
from onescan.kernels.common import Case
from onescan.ops.backend import chip_of, launch, name_of, target_programs
from onescan.shapes import Angles, Frequencies, Keys, RotatedKeys


def forward(x: Keys, angles: Angles) -> RotatedKeys:
    """Rotate x, with first derivatives only."""
    return _rotate(x.contiguous(), angles.float().contiguous())


def grid_angles(shape: tuple[int, ...], theta: Frequencies, *, prefix: int, start: int) -> Angles:
    """Compute `onescan.ops.lrpe.lrpe_angles` in [-pi, pi], with first derivatives only."""
    return _grid_angles(theta.contiguous(), list(shape), prefix, start)


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


@torch.library.custom_op("onescan::lrpe_angles", mutates_args=())
def _grid_angles(theta: Tensor, shape: Sequence[int], prefix: int, start: int) -> Tensor:
    heads, width = theta.shape
    tokens = prefix + math.prod(shape)
    angles = theta.new_empty(tokens, heads, width)
    case, _ = _case(theta)
    for axis in _axes(shape, width, start):
        numbers = tokens * heads * axis.features
        grid = (-(-numbers // kernels.blocks_of(case).keys),)
        launch(kernels.grid_angles, case, grid, theta, angles, tokens, prefix, *axis)
    return angles


@_grid_angles.register_fake
def _(theta: Tensor, shape: Sequence[int], prefix: int, start: int) -> Tensor:
    return theta.new_empty(prefix + math.prod(shape), *theta.shape)


@torch.library.custom_op("onescan::lrpe_angles_backward", mutates_args=())
def _grid_angles_backward(
    dangles: Tensor, shape: Sequence[int], prefix: int, start: int
) -> Tensor:  # fmt: skip
    tokens, heads, width = dangles.shape
    case, _ = _case(dangles)
    parts = -(-tokens // kernels.TOKENS)
    sums = dangles.new_empty(parts, heads, width, dtype=torch.float64)
    for axis in _axes(shape, width, start):
        grid = (parts, -(-heads * axis.features // kernels.blocks_of(case).keys))
        launch(
            kernels.grid_angles_back, case, grid,
            dangles, sums, tokens, kernels.TOKENS, prefix, *axis,
        )  # fmt: skip
    return sums.sum(0).to(dangles.dtype)


@_grid_angles_backward.register_fake
def _(dangles: Tensor, shape: Sequence[int], prefix: int, start: int) -> Tensor:
    return torch.empty_like(dangles[0])


def _save_grid(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.grid = inputs[1:]


def _backward_of_grid(ctx: Any, dangles: Tensor) -> tuple[Tensor, None, None, None]:
    return _grid_angles_backward(dangles.contiguous(), *ctx.grid), None, None, None


_grid_angles.register_autograd(_backward_of_grid, setup_context=_save_grid)


class _Axis(NamedTuple):
    """Positions along an axis of a grid, and the features that belong to it, as kernels read them.

    Attributes:
        origin: The first position.
        size: Number of positions.
        stride: Distance between neighboring tokens.
        feature: The first feature.
        features: Number of features.
    """

    origin: int
    size: int
    stride: int
    feature: int
    features: int


def _axes(shape: Sequence[int], width: int, start: int) -> Iterator[_Axis]:
    """Yield the axes that have features."""
    share = -(-width // len(shape))
    for axis, feature in enumerate(range(0, width, share)):
        stride = math.prod(shape[axis + 1 :])
        features = min(share, width - feature)
        yield _Axis(0 if axis else start, shape[axis], stride, feature, features)


def _case(angles: Tensor) -> tuple[Case, int]:
    """Return the compile-time parameters and the number of blocks of angles."""
    heads, width = angles.shape[-2:]
    case = Case(name_of(angles.dtype), chip_of(angles.device), heads, key_width=width)
    return case, max(1, -(-angles.numel() // kernels.blocks_of(case).keys))


def _parts(x: Tensor, blocks: int) -> int:
    """Return the number of parts that the samples are divided into."""
    return max(1, min(x.shape[0], -(-target_programs(x.device) // blocks)))
