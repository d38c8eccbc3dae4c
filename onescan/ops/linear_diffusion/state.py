"""What a kernel that looks back still needs of the tokens before a call: the last R of them."""

from typing import NamedTuple

import torch

from onescan.shapes import Keep, Values


class DiffusionState(NamedTuple):
    """The tokens before a call, as far as a kernel of radius R reaches.

    Attributes:
        x: [B, R, H, V], the last R tokens, not yet moved. Where fewer came, the first are zeros.
        keep: [B, R], True for real tokens among them.
    """

    x: Values
    keep: Keep


def following(
    state: DiffusionState | None, x: Values, keep: Keep | None, *, radius: int
) -> DiffusionState:
    """The state after the tokens x, given the one before them; None is the beginning.

    Raises:
        ValueError: a state of another radius, or a radius that is no whole number from 0 on.

    >>> x = torch.arange(3.0).reshape(1, 3, 1, 1)
    >>> following(None, x, None, radius=2).x.flatten().tolist()
    [1.0, 2.0]
    >>> following(None, x[:, 2:], None, radius=2).keep.tolist()
    [[False, True]]
    """
    if isinstance(radius, bool) or not isinstance(radius, int) or radius < 0:
        raise ValueError(f"radius is {radius!r}, expected a whole number from 0 on")
    if state is not None and state.x.shape[1] != radius:
        raise ValueError(f"state is of radius {state.x.shape[1]}, expected {radius}")
    if keep is None:
        keep = x.new_ones(x.shape[:2], dtype=torch.bool)
    if state is None:
        nothing = x.new_zeros(x.shape[0], radius, *x.shape[2:])
        state = DiffusionState(nothing, keep.new_zeros(x.shape[0], radius))
    new = min(x.shape[1], radius)  # and what is not needed is not held in memory
    last_x, last_keep = x[:, x.shape[1] - new :], keep[:, x.shape[1] - new :]
    return DiffusionState(
        torch.cat([state.x[:, new:], last_x], dim=1),
        torch.cat([state.keep[:, new:], last_keep], dim=1),
    )
