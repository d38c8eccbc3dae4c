"""Rotary positions (RoPE): queries and keys are rotated by their position along one axis."""

import torch
from jaxtyping import Float
from torch import Tensor

from onescan.ops.lrpe import lrpe_angles
from onescan.ops.numerics import accumulation_dtype
from onescan.shapes import Grid, Position

RotaryAngles = Float[Tensor, "T 1 _"]  # K / 2 in each head

BASE = 10_000.0


def rotary_angles(
    grid: Grid, width: int, *, start: Position, dtype: torch.dtype, device: torch.device
) -> RotaryAngles:
    """Return the angles n 10000^(-2j / K) of positions n, for j < K / 2, as [T, 1, K / 2].

    Args:
        grid: Layout of the tokens, with one axis. Prefix tokens are not rotated.
        width: Channels of a head, K.
        start: Position of the first token.
        dtype: Dtype of queries and keys; angles are in float32 or wider.
        device: Device of the angles.
    """
    half = width // 2
    j = torch.arange(half, dtype=accumulation_dtype(dtype), device=device)
    theta = BASE ** -(j / half)
    return lrpe_angles(grid.shape, theta.unsqueeze(0), prefix=grid.prefix, start=start)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate channels j and j + K / 2 by the angle of j, as in LLaMA's code.

    Source: RoFormer, arXiv:2104.09864, Eq. 34.

    Args:
        x: Queries or keys, [..., K].
        angles: Angles, whose shape broadcasts to [..., K / 2].
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def check_rotary(axes: int, head_width: int) -> None:
    """Raise ValueError if there are several axes, or an odd number of channels."""
    if axes > 1 or head_width % 2:
        raise ValueError(
            f"mixer.rotary is True with {axes} axes and heads of width {head_width}, expected "
            "one axis and an even width"
        )
