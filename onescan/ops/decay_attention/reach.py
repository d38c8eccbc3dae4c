"""How much is left of what passes through a stretch of tokens."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.numerics import LEAST_WEIGHT, doubled

VANISHED = -800.0  # exp of less is 0 in every type
LEAST = math.log(LEAST_WEIGHT)


class Reach(NamedTuple):
    """How much is left, in one direction, of what passes through a stretch.

    Attributes:
        enter: of what enters, at each token, [..., L, X].
        leave: of each token, where it leaves, [..., L, X].
        through: of what enters, where it leaves, [..., 1, X].
    """

    enter: Tensor
    leave: Tensor
    through: Tensor


def totals(log_decay: Tensor, *, backward: bool) -> Tensor:
    """The sum of log-decays [..., L, X] from where a direction starts up to each token, in float64.

    There a difference of two sums is exact enough to be rounded: nothing that lies between near
    tokens is lost beside what lies before them.
    """
    wide = doubled(log_decay).clamp(min=VANISHED)
    return wide.flip(-2).cumsum(-2).flip(-2) if backward else wide.cumsum(-2)


def reach(total: Tensor, dtype: torch.dtype, *, backward: bool) -> Reach:
    """Of such sums, in a type."""
    at_end = slice(1) if backward else slice(-1, None)
    enter, leave = (left_of(x.to(dtype)) for x in (total, total[..., at_end, :] - total))
    return Reach(enter, leave, enter[..., at_end, :])


def left_of(logs: Tensor, *, in_place: bool = False) -> Tensor:
    """The exponential of what decays add up to; below float64 less than `LEAST_WEIGHT` is nothing.

    Products with less leave the normal range of float32, and a CPU takes many times as long.

    >>> left_of(torch.tensor([0.0, -70.0])).tolist()
    [1.0, 0.0]
    """
    if logs.dtype != torch.float64:
        logs = F.threshold(logs, LEAST, -torch.inf, inplace=in_place)
    return logs.exp_() if in_place else logs.exp()
