"""The orders in which scans visit the tokens of a grid."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from onescan.shapes import Grid

Indices = Int[Tensor, " T"]


class Order(NamedTuple):
    """An order of the tokens of a grid.

    Attributes:
        token: which token comes at each step.
        step: at which step each token comes: the way back.
    """

    token: Indices
    step: Indices


def snake_orders(grid: Grid, device: torch.device) -> tuple[Order, ...]:
    """One order for each axis of a grid, in which that axis runs fastest; the last axis first.

    An axis turns round wherever a slower one steps on, so that neighbours in the order are
    neighbours on the grid. Prefix tokens come first.

    Source: LION, arXiv:2502.16249, App. C.14 and Fig. 11, for two axes.

    >>> rows, columns = snake_orders(Grid((2, 3)), torch.device("cpu"))
    >>> rows.token.tolist(), columns.token.tolist()
    ([0, 1, 2, 5, 4, 3], [0, 3, 4, 1, 2, 5])
    """
    tokens = torch.arange(grid.tokens, device=device)
    prefix, places = tokens[: grid.prefix], tokens[grid.prefix :].reshape(grid.shape)
    visits = (
        torch.cat([prefix, _snake(places.movedim(axis, -1))])
        for axis in reversed(range(places.ndim))
    )
    return tuple(
        Order(token, torch.empty_like(token).scatter_(0, token, tokens)) for token in visits
    )


def _snake(places: Tensor) -> Indices:
    """Flatten a grid, line after line, every other one backward."""
    while places.ndim > 1:
        odd = torch.arange(places.shape[-2], device=places.device) % 2 == 1
        places = torch.where(odd.unsqueeze(-1), places.flip(-1), places).flatten(-2)
    return places
