"""Snake scans along each axis of a grid, on a single process or over several ranks."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onescan.layers.tokens import snake_orders
from onescan.ops.collectives import Permutation
from onescan.ops.parallel import SequenceGroup, sequence_group
from onescan.shapes import Grid, Hidden


class SnakeScans:
    """Snake scans along each axis of a grid, whose outputs a mixer averages.

    If the grid is sharded across a process group, each rank visits a shard of every scan, with
    as many steps as it has tokens. Only the scan along the first axis moves tokens between ranks.

    Args:
        grid: Layout of the tokens of this rank.
        x: Tokens of this rank.
    """

    def __init__(self, grid: Grid, x: Hidden) -> None:
        self.group = sequence_group(None)
        self.orders: Sequence[tuple[Any, Any]]  # to the order of each scan, and back
        if self.group is None:
            self.orders = snake_orders(grid, x.device)
        else:
            whole, lengths = whole_grid(self.group, grid, x)
            self.orders = _orders_over_ranks(whole, tuple(lengths), self.group.rank, x.device)

    def visit(self, scans: Sequence[Sequence[Tensor | None]]) -> list[Any]:
        """Reorder the inputs of each scan, [B, T, ...], and concatenate them along the batch.

        Inputs that are None in all scans remain None.
        """
        indices = [i for i, x in enumerate(scans[0]) if x is not None]
        pairs = zip(scans, self.orders, strict=True)
        permuted = [self._permuted(order, [scan[i] for i in indices]) for scan, (order, _) in pairs]
        visited: list[Any] = [None] * len(scans[0])
        for i, *inputs in zip(indices, *permuted, strict=True):
            visited[i] = torch.cat(inputs)
        return visited

    def mean(self, x: Tensor) -> Tensor:
        """Restore the order of the tokens, and average the scans, concatenated as in `visit`."""
        scans = x.unflatten(0, (len(self.orders), -1)).unbind()
        pairs = zip(scans, self.orders, strict=True)
        restored = [self._permuted(inverse, [y])[0] for y, (_, inverse) in pairs]
        return torch.stack(restored).mean(dim=0)

    def _permuted(self, order: Any, tensors: Sequence[Any]) -> list[Tensor]:
        if self.group is None:
            return [x.index_select(1, order) for x in tensors]
        return order(self.group, tensors)


@lru_cache(maxsize=4)  # for the scans of all layers
@torch.inference_mode(False)  # so that later calls can compute gradients
def _orders_over_ranks(
    grid: Grid, lengths: tuple[int, ...], rank: int, device: torch.device
) -> list[tuple[Permutation, Permutation]]:
    """Return the permutations to and from each scan of the grid of all ranks."""
    orders = snake_orders(grid, torch.device("cpu"))
    return [
        (Permutation(token, lengths, rank, device), Permutation(step, lengths, rank, device))
        for token, step in orders
    ]


def whole_grid(group: SequenceGroup, grid: Grid, x: Hidden) -> tuple[Grid, list[int]]:
    """Return the grid of all ranks and the number of tokens of each, given those of this rank."""
    lengths = group.lengths(x)
    shape = (sum(group.positions(grid.shape, x.device)), *grid.shape[1:])
    return Grid(shape, sum(lengths) - math.prod(shape)), lengths
