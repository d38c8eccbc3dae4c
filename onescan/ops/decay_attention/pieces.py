"""Some samples and some heads of a tensor at a time, in memory that is not touched twice.

Slices of slices would each have a gradient of the whole's size, and torch.cat of torch.cat copy
every output twice.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Range = tuple[int, int]
Place = tuple[Range | None, Range | None]  # samples and heads; None is all


def places(batch: int, heads: int, samples: int, heads_at_once: int) -> list[Place]:
    """Where so many samples, and so many heads of each, are.

    >>> places(2, 3, 1, 2)
    [((0, 1), (0, 2)), ((0, 1), (2, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3))]
    """
    some, few = (
        [(start, min(start + length, total)) for start in range(0, max(1, total), length)]
        for total, length in ((batch, max(1, samples)), (heads, heads_at_once))
    )  # no samples are in one place too
    return [(x, y) for x in some for y in few]


def cut(x: Tensor | None, axis: int, where: Sequence[Place]) -> list[Any]:
    """The part in each place, heads along an axis; what samples or heads share is in all theirs."""
    if x is None:
        return [None] * len(where)
    own = [
        (samples if x.shape[0] > 1 else None, heads if x.shape[axis] > 1 else None)
        for samples, heads in where
    ]
    different = list(dict.fromkeys(own))
    if len(different) == 1:
        return [x] * len(where)
    parts = dict(zip(different, _Cut.apply(x, axis, different), strict=True))
    return [parts[place] for place in own]


def joined(
    parts: Iterable[Tensor], shape: Sequence[int], axis: int, where: Sequence[Place]
) -> Tensor:
    """A tensor of this shape from its part in each place; without gradients none is kept."""
    if torch.is_grad_enabled():
        return _Joined.apply(shape, axis, where, *parts)
    return _together(parts, shape, axis, where)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, where: Sequence[Place]) -> tuple[Tensor, ...]:
        ctx.where = x.shape, axis, where
        return tuple(_part(x, axis, place) for place in where)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return _Joined.apply(*ctx.where, *slopes), None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: Sequence[int], axis: int, where: Sequence[Place], *parts: Tensor
    ) -> Tensor:
        ctx.where = axis, where
        return _together(parts, shape, axis, where)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_Cut.apply(slope, *ctx.where)


def _together(
    parts: Iterable[Tensor], shape: Sequence[int], axis: int, where: Sequence[Place]
) -> Tensor:
    whole = None
    for place, part in zip(where, parts, strict=True):
        whole = part.new_empty(shape) if whole is None else whole
        _part(whole, axis, place).copy_(part)
    assert whole is not None
    return whole


def _part(x: Tensor, axis: int, place: Place) -> Tensor:
    for of, bounds in zip((0, axis), place, strict=True):
        if bounds is not None:
            x = x.narrow(of, bounds[0], bounds[1] - bounds[0])
    return x
