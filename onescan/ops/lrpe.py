"""MD-LRPE: one rotation angle per feature encodes positions along any number of axes.

angle_n,j = n_s theta_j                     s the axis that feature j belongs to    (K,)
R_n(x)    = [x cos(angle_n), x sin(angle_n)]                                        (2K,)

so that R_n(q) . R_m(k) = sum_j q_j k_j cos((n_s - m_s) theta_j) depends only on relative positions.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from onescan.checks import (
    as_grid_shape,
    can_look_at_values,
    check_devices,
    check_floating,
    check_positive,
    check_shapes,
    check_whole,
    is_known,
)
from onescan.ops.backend import Backend, resolved_backend
from onescan.ops.numerics import accumulation_dtype, to_accumulation_dtype, wrap_angle
from onescan.ops.parallel import Group, is_empty_grid, sequence_group
from onescan.shapes import Angles, Frequencies, FrequencyRow, Keys, Position, RotatedKeys

BLOCK = 64  # positions per block of `_axis_angles`


class RotaryPositions(NamedTuple):
    """Positions of consecutive tokens along one axis, in place of their LRPE angles.

    Decoding kernels compute the angles (start + t) theta themselves.

    Attributes:
        theta: Radians per step, [H, K].
        start: Position of the first token, a number or an integer tensor.
    """

    theta: Frequencies
    start: Position = 0

    def angles(self, tokens: int, group: Group | None = None) -> Angles:
        """Return the angles of this number of tokens; see `lrpe_angles`."""
        return lrpe_angles((tokens,), self.theta, start=self.start, group=group)


def lrpe(x: Keys, angles: Angles, *, backend: Backend = "auto") -> RotatedKeys:
    """Rotate queries or keys: [x cos, x sin], in x's dtype.

    The layout is ``[B, T, H, K]``, unlike the ``[B, H, T, K]`` of torch's
    ``scaled_dot_product_attention``.

    Source: LightNet, arXiv:2405.21022, App. A.2 and App. B.

    Args:
        x: Queries or keys, [B, T, H, K], after their feature map.
        angles: Angles from `lrpe_angles`, [T, H, K]. Their sines and cosines are computed in their
            dtype.
        backend: "torch" runs on any device. "triton" runs on a GPU, computes in float32 and has
            first derivatives only. "auto" chooses; see `use_backend`.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is not floating point, the backend
            is unknown, or "triton" cannot run on these inputs.

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
    return rotate(x, *rotary_tables(angles, angles.dtype)).to(x.dtype)


def rotary_tables(
    angles: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return cosines and sines of the angles, computed in their dtype; None without angles."""
    return (None, None) if angles is None else (angles.cos().to(dtype), angles.sin().to(dtype))


def rotary_table(angles: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the stacked cosines and sines of the angles, [T, H, 2, K]; None without angles."""
    cos, sin = rotary_tables(angles, dtype)
    return None if cos is None or sin is None else torch.stack([cos, sin], dim=-2)


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Return [x cos, x sin]; x itself without tables."""
    return x if cos is None or sin is None else rotate_by(x, torch.stack([cos, sin], dim=-2))


def rotate_by(x: Tensor, table: Tensor | None) -> Tensor:
    """Return [x cos, x sin], from the stacked cosines and sines; x itself without a table."""
    return x if table is None else (x.unsqueeze(-2) * table).flatten(-2)


def lrpe_angles(
    shape: tuple[int, ...],
    theta: Frequencies,
    *,
    prefix: int = 0,
    start: int | Int[Tensor, ""] = 0,
    group: Group | None = None,
) -> Angles:
    """Compute the angle of each token of a grid in row-major order, modulo 2 pi.

    Source: LightNet, arXiv:2405.21022, Eq. 20 and App. B. Feature j belongs to axis
    j // ceil(K / axes), as in App. B and unlike the indices printed in Eq. 20. The last axes may
    get fewer features.

    Angles are computed and reduced in float64, then rounded: for theta up to 1, the error of
    float32 angles is below 1e-6 up to position 1e9. MPS has no float64, so the error grows with the
    position there.

    Args:
        shape: Number of tokens along each axis.
        theta: Radians per step along the feature's axis.
        prefix: Number of tokens before the grid, such as a class token. Their angle is 0.
        start: Position of the first token along the first axis, to continue a sequence or a grid.
            May be an integer tensor, for export; its value is not checked.
        group: Process group across which the first axis is sharded in rank order; `shape` is then
            that of this rank's part of the grid, which may be empty, and `start` the position of
            the first rank's first token. Only the first rank may have a prefix. None uses the group
            of `onescan.ops.parallel.sequence_parallel`, if any.

    Returns:
        Angles in [-2 pi, 2 pi], in float32, or float64 for float64 theta. Their gradient with
        respect to theta is the position.

    Raises:
        ValueError: If shape has no axis or an empty one, if prefix or start is not a whole number
            of at least 0, if start is combined with a prefix, if a rank other than the first has a
            prefix or, on a CPU, if theta is not finite.

    >>> theta = torch.tensor([[1.0, 3.0]])
    >>> lrpe_angles((2, 2), theta, prefix=1).squeeze(1).tolist()
    [[0.0, 0.0], [0.0, 0.0], [0.0, 3.0], [1.0, 0.0], [1.0, 3.0]]
    """
    check_shapes(theta=(theta, "H K"))
    check_floating(theta=theta)
    ranks = sequence_group(group)
    if empty := is_empty_grid(ranks, shape):
        shape = (1, *shape[1:])
    shape = as_grid_shape(shape)
    _check_positions(prefix, start)
    if ranks is not None:
        before = ranks.first_position((0 if empty else shape[0], *shape[1:]), theta.device)
        if not ranks.is_first:
            if prefix:
                raise ValueError(
                    f"prefix is {prefix} on rank {ranks.rank}, expected 0 except on rank 0"
                )
            start = start + before
    if can_look_at_values(theta) and not theta.detach().isfinite().all():
        raise ValueError("theta contains NaN or infinity, expected finite frequencies")
    (theta,) = to_accumulation_dtype(theta)
    backend = resolved_backend("auto", True, theta, widest=None)
    if backend == "triton" and isinstance(start, int) and not empty:
        from onescan.ops import lrpe_launch

        return lrpe_launch.grid_angles(shape, theta, prefix=prefix, start=start)
    along = []  # of each axis that has features: 1 .. n .. 1 H K
    for axis, table in enumerate(_axis_tables(shape, start, theta)):
        size = [1] * len(shape)
        size[axis] = shape[axis]
        along.append(table.reshape(*size, *table.shape[1:]).expand(*shape, *table.shape[1:]))
    angles = (along[0] if len(along) == 1 else torch.cat(along, dim=-1)).flatten(0, -3)
    angles = angles[:0] if empty else angles
    return F.pad(angles, (0, 0, 0, 0, prefix, 0)) if prefix else angles


def _axis_tables(
    shape: tuple[int, ...], start: int | Int[Tensor, ""], theta: Frequencies
) -> list[Tensor]:
    """Return the angles of each axis that has features, [n, H, features of the axis]."""
    widths = _features_per_axis(theta.shape[1], len(shape))
    is_eager = not torch.compiler.is_compiling() and all(map(is_known, shape))  # no guards on sizes
    if is_eager and isinstance(start, int) and not start and len(set(shape)) == 1:
        return list(_axis_angles(shape[0], 0, theta).split(widths, dim=-1))  # all in one table
    return [
        _axis_angles(shape[axis], 0 if axis else start, part)
        for axis, part in enumerate(theta.split(widths, dim=1))
    ]


def _axis_angles(count: int, start: int | Int[Tensor, ""], theta: Frequencies) -> Angles:
    """Compute the angles of `count` positions from `start` on, modulo 2 pi.

    The angle of position start + 64 i + j is the sum of those of start + 64 i and j, which saves
    float64 operations on long axes.
    """
    if not is_known(count) or count <= BLOCK:
        return _reduced_angles(count, start, 1, theta)
    coarse = _reduced_angles(-(-count // BLOCK), start, BLOCK, theta)
    fine = _reduced_angles(BLOCK, 0, 1, theta)
    return (coarse.unsqueeze(1) + fine).flatten(0, 1)[:count]


def _reduced_angles(
    count: int, start: int | Int[Tensor, ""], step: int, theta: Frequencies
) -> Angles:
    """Multiply positions, `step` apart, by theta and reduce to [-pi, pi] in float64.

    The result is rounded to theta's dtype.
    """
    wide = torch.float32 if theta.device.type == "mps" else torch.float64
    positions = torch.arange(count, dtype=wide, device=theta.device)
    if step != 1:
        positions = positions * step
    if isinstance(start, Tensor) or start:
        positions = positions + start
    return wrap_angle(positions[:, None, None] * theta).to(theta.dtype)


def lrpe_frequencies(width: int, axes: int, base: float = 10000.0) -> FrequencyRow:
    """Return the initial theta of one head: base^(-2j/K), with j restarting at 0 for each axis.

    Source: LightNet, arXiv:2405.21022, Eq. 20. All axes share their frequencies as in App. B.
    Otherwise the angles of the last axes would hardly change. The paper does not say if its d is
    the width of a head or of the model. Here, it is the width K of a head, so that all heads start
    with the same frequencies. The result has the default dtype, but at least float32, because an
    angle contains the rounding error of theta times the position.

    >>> lrpe_frequencies(4, axes=2).tolist()
    [1.0, 0.009999999776482582, 1.0, 0.009999999776482582]
    """
    check_whole(1, width=width, axes=axes)
    check_positive(base=base)
    j = torch.arange(width) % _features_per_axis(width, axes)
    return base ** (-2.0 * j.to(accumulation_dtype(torch.get_default_dtype())) / width)


def check_axes_have_features(width: int, axes: int, *, described: str) -> None:
    """Raise ValueError if the heads are too narrow to rotate features of each axis."""
    if _features_per_axis(width, axes) * (axes - 1) >= width:
        raise ValueError(
            f"{described} leaves the last of {axes} axes without features for lrpe; a multiple of "
            f"{axes} gives each axis the same number"
        )


def _features_per_axis(width: int, axes: int) -> int:
    return -(-width // axes)


def _check_positions(prefix: int, start: Any) -> None:  # Any: a user passed it
    is_tensor = isinstance(start, Tensor)
    check_whole(0, prefix=prefix, start=0 if is_tensor else start)
    if (is_tensor or start) and prefix:
        raise ValueError(f"start is {start} with prefix={prefix}, expected one of them to be 0")
