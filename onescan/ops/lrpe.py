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
from onescan.ops.numerics import widened
from onescan.shapes import Angles, Frequencies, FrequencyRow, Keys, RotatedKeys


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
        from onescan.ops import triton_lrpe

        return triton_lrpe.forward(x, angles)
    turn = torch.stack([angles.cos(), angles.sin()], dim=-2)  # T H 2 K
    return (x.unsqueeze(-2) * turn).flatten(-2).to(x.dtype)


def lrpe_angles(
    shape: tuple[int, ...],
    theta: Frequencies,
    *,
    prefix: int = 0,
    start: int | Int[Tensor, ""] = 0,
) -> Angles:
    """The angle of each token of a grid, row by row, behind `prefix` tokens of angle 0.

    Source: LightNet, arXiv:2405.21022, Eq. 20 and App. B. As in App. B, and against the indices
    printed in Eq. 20, feature j belongs to axis j // ceil(K / axes): the last axes may get fewer.

    Args:
        shape: tokens along each axis.
        theta: radians per step along the feature's axis.
        prefix: tokens before the grid that have no place in it, such as a class token.
        start: position of the first token, to continue a sequence; for one axis only. A tensor,
            whose value is not looked at, is for export.

    Returns:
        Angles in float32, or float64 for float64 theta.

    Raises:
        ValueError: a shape without axes or with an empty one, a negative prefix or start, a start
            with several axes or with a prefix.

    >>> theta = torch.tensor([[1.0, 10.0]])
    >>> lrpe_angles((2, 2), theta, prefix=1).squeeze(1).tolist()
    [[0.0, 0.0], [0.0, 0.0], [0.0, 10.0], [1.0, 0.0], [1.0, 10.0]]
    """
    check_shapes(theta=(theta, "H K"))
    check_floating(theta=theta)
    _check_positions(shape, prefix, start)
    (theta,) = widened(theta)
    along = [torch.arange(n, device=theta.device) + start for n in shape]
    positions = torch.stack(torch.meshgrid(*along, indexing="ij"), dim=-1).flatten(0, -2)
    positions = positions.to(theta.dtype)
    positions = F.pad(positions, (0, 0, prefix, 0))  # T axes
    per_axis = _features_per_axis(theta.shape[1], len(shape))
    positions = positions.repeat_interleave(per_axis, dim=1)[:, : theta.shape[1]]  # T K
    return positions.unsqueeze(1) * theta


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
