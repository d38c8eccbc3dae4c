"""How the scores of a chunk come about: what differs between one decay a token and one a channel.

In place means that results are written over what nobody else sees: that is faster on a CPU, and is
what chunks in turns do. Else functions are made of what autograd, vmap and compilers follow.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Out = Sequence[Tensor | None]  # where results are written, if so


class Scores(NamedTuple):
    """Scores of all queries of a chunk with all its keys, after decay, and their gradients.

    Attributes:
        prepared: what `weights` and `slopes` are given of the tensors that scores depend on beside
            queries and keys.
        weights: the scores of q, k and these; in place or not.
        slopes: of the gradient of scores, q, k and these the scores; the gradients of q and k,
            which are written to `out`; and, if wanted, those of what `prepared` was given.
    """

    prepared: Callable[..., tuple[Tensor, ...]]
    weights: Callable[..., Tensor]
    slopes: Callable[..., tuple[Tensor, ...]]


def times(x: Tensor, by: Tensor, *, in_place: bool) -> Tensor:
    """What only the caller knows, multiplied."""
    return x.mul_(by) if in_place else x * by


def plus_product(total: Tensor, x: Tensor, y: Tensor, *, in_place: bool) -> Tensor:
    """What only the caller knows, with a product of matrices added, [..., I, J]."""
    if not in_place:
        return total + x @ y
    total.flatten(0, -3).baddbmm_(x.flatten(0, -3), y.flatten(0, -3))
    return total


def product(x: Tensor, y: Tensor, out: Tensor | None) -> Tensor:
    """A product of matrices, [..., I, J]."""
    return torch.matmul(x, y, out=out)


def plus(total: Tensor, x: Tensor, y: Tensor, *, in_place: bool) -> Tensor:
    """What only the caller knows, with a product of numbers added."""
    return total.addcmul_(x, y) if in_place else total + x * y
