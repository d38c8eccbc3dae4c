"""MD-LRPE: position as an angle per feature, in any number of axes.

angle_n,j = n_s theta_j                     s the axis that feature j belongs to    (K,)
R_n(x)    = [x cos(angle_n), x sin(angle_n)]                                        (2K,)

so that R_n(q) . R_m(k) = sum_j q_j k_j cos((n_s - m_s) theta_j) depends on differences alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from onescan.checks import (
    check_devices,
    check_floating,
    check_grid_shape,
    check_positive,
    check_shapes,
)
from onescan.ops.backend import Backend, resolved_backend
from onescan.ops.chunks import is_known
from onescan.ops.numerics import doubled, modulo_turn, widened
from onescan.shapes import Angles, Frequencies, FrequencyRow, Keys, RotatedKeys

BLOCK = 64  # positions per block of `_axis_angles`


def lrpe(x: Keys, angles: Angles, *, backend: Backend = "auto") -> RotatedKeys:
    """Rotate queries or keys: [x cos, x sin], in x's dtype.

    Source: LightNet, arXiv:2405.21022, App. A.2 and App. B.

    Args:
        x: queries or keys, after their feature map.
        angles: from `lrpe_angles`; sines and cosines are taken in its dtype.
        backend: "torch" runs anywhere, "triton" on a GPU, in float32, and has gradients once;
            "auto" is as `use_backend` says.

    Raises:
        ValueError: shapes disagree, a tensor that is not floating point, there is no such backend,
            or a kernel was asked for that cannot run.

    >>> x = torch.tensor([3.0]).reshape(1, 1, 1, 1)
    >>> lrpe(x, torch.zeros(1, 1, 1)).flatten().tolist()
    [3.0, 0.0]
    """
    check_shapes(x=(x, "B T H K"), angles=(angles, "T H K"))
    check_floating(x=x, angles=angles)
    check_devices(x=x, angles=angles)
    if resolved_backend(backend, True, x, angles) == "triton":
        from onescan.ops import lrpe_launch

        return lrpe_launch.forward(x, angles)
    turn = torch.stack([angles.cos(), angles.sin()], dim=-2)  # T H 2 K
    return (x.unsqueeze(-2) * turn).flatten(-2).to(x.dtype)


def lrpe_angles(
    shape: tuple[int, ...],
    theta: Frequencies,
    *,
    prefix: int = 0,
    start: int | Int[Tensor, ""] = 0,
) -> Angles:
    """Compute the angle of each token of a grid, row by row, modulo a full turn.

    Source: LightNet, arXiv:2405.21022, Eq. 20 and App. B. As in App. B, and against the indices
    printed in Eq. 20, feature j belongs to axis j // ceil(K / axes): the last axes may get fewer.

    Angles are computed and reduced in float64, then rounded: for theta up to 1, the error of
    float32 angles is below 1e-6 up to position 1e9. MPS has no float64, so the error grows with the
    position there.

    Args:
        shape: tokens along each axis.
        theta: radians per step along the feature's axis.
        prefix: tokens before the grid, such as a class token; their angle is 0.
        start: position of the first token, to continue a sequence; one axis only. May be an
            integer tensor, for export; its value is not checked.

    Returns:
        Angles in [-2 pi, 2 pi], in float32, or float64 for float64 theta. Their gradient with
        respect to theta is the position.

    Raises:
        ValueError: If shape has no axis or an empty one, if prefix or start is negative, or if
            start is combined with several axes or a prefix.

    >>> theta = torch.tensor([[1.0, 3.0]])
    >>> lrpe_angles((2, 2), theta, prefix=1).squeeze(1).tolist()
    [[0.0, 0.0], [0.0, 0.0], [0.0, 3.0], [1.0, 0.0], [1.0, 3.0]]
    """
    check_shapes(theta=(theta, "H K"))
    check_floating(theta=theta)
    _check_positions(shape, prefix, start)
    (theta,) = widened(theta)
    along = []  # of each axis that has features: 1 .. n .. 1 H K
    for axis, part in enumerate(theta.split(_features_per_axis(theta.shape[1], len(shape)), dim=1)):
        size = [1] * len(shape)
        size[axis] = shape[axis]
        angles = _axis_angles(shape[axis], start, part).reshape(*size, *part.shape)
        along.append(angles.expand(*shape, *part.shape))
    angles = (along[0] if len(along) == 1 else torch.cat(along, dim=-1)).flatten(0, -3)
    return F.pad(angles, (0, 0, 0, 0, prefix, 0)) if prefix else angles


def _axis_angles(count: int, start: int | Int[Tensor, ""], theta: Frequencies) -> Angles:
    """Compute the angles of `count` positions from `start` on, modulo a full turn.

    The angle of position start + 64 i + j is the sum of those of start + 64 i and j, which saves
    float64 operations on long axes.
    """
    if not is_known(count) or count <= BLOCK:
        return _reduced_angles(torch.arange(count, device=theta.device) + start, theta)
    blocks = torch.arange(0, count, BLOCK, device=theta.device) + start
    inside = torch.arange(BLOCK, device=theta.device)
    coarse, fine = (_reduced_angles(x, theta) for x in (blocks, inside))
    return (coarse.unsqueeze(1) + fine).flatten(0, 1)[:count]


def _reduced_angles(positions: Int[Tensor, " T"], theta: Frequencies) -> Angles:
    """Multiply positions by theta and reduce to [-pi, pi] in float64; rounded to theta's dtype."""
    wide = doubled(theta)
    return modulo_turn(positions.to(wide.dtype)[:, None, None] * wide).to(theta.dtype)


def lrpe_frequencies(width: int, axes: int, base: float = 10000.0) -> FrequencyRow:
    """Initial theta of one head: base^(-2j/K), j counted from 0 again for each axis.

    Source: LightNet, arXiv:2405.21022, Eq. 20; the restart is that of App. B, where all axes share
    their frequencies. Without it the last axes hardly turn at all.

    >>> lrpe_frequencies(4, axes=2).tolist()
    [1.0, 0.009999999776482582, 1.0, 0.009999999776482582]
    """
    check_positive(width=width, axes=axes, base=base)
    j = torch.arange(width) % _features_per_axis(width, axes)
    return base ** (-2.0 * j / width)


def _features_per_axis(width: int, axes: int) -> int:
    return -(-width // axes)


def _check_positions(shape: Any, prefix: int, start: Any) -> None:  # Any: a user passed it
    check_grid_shape(shape)
    is_tensor = isinstance(start, Tensor)
    if prefix < 0 or (not is_tensor and start < 0):
        raise ValueError(f"prefix is {prefix} and start {start}, expected numbers from 0")
    if (is_tensor or start) and (prefix or len(shape) > 1):
        raise ValueError(
            f"start is {start} with prefix={prefix} and shape={shape}, expected a start with one "
            "axis and no prefix: only a sequence can be continued"
        )
