"""The orders of natural scans: by hand, as permutations, as walks from neighbor to neighbor."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake

from onescan.layers.tokens import snake_orders
from onescan.shapes import Grid

CPU = torch.device("cpu")
GRIDS = (Grid((1,)), Grid((5,), 2), Grid((3, 4)), Grid((4, 3), 1), Grid((1, 6)), Grid((2, 3, 4), 1))
over_grids = pytest.mark.parametrize("grid", GRIDS, ids=str)


def visits(grid):
    return [order.token.tolist() for order in snake_orders(grid, CPU)]


def test_by_hand():
    assert visits(Grid((3, 3))) == [[0, 1, 2, 5, 4, 3, 6, 7, 8], [0, 3, 6, 7, 4, 1, 2, 5, 8]]
    assert visits(Grid((2, 3), prefix=1)) == [[0, 1, 2, 3, 6, 5, 4], [0, 1, 4, 5, 2, 3, 6]]
    assert visits(Grid((4,), prefix=2)) == [[0, 1, 2, 3, 4, 5]]
    assert visits(Grid((2, 2, 2))) == [
        [0, 1, 3, 2, 6, 7, 5, 4],
        [0, 2, 3, 1, 5, 7, 6, 4],
        [0, 4, 5, 1, 3, 7, 6, 2],
    ]


@over_grids
def test_every_token_is_visited_once_and_finds_its_way_back(grid):
    orders = snake_orders(grid, CPU)
    assert len(orders) == len(grid.shape)
    x = torch.randn(grid.tokens)
    for token, step in orders:
        assert sorted(token.tolist()) == list(range(grid.tokens))
        assert torch.equal(x[token][step], x)


@over_grids
def test_a_step_leads_to_a_neighbor_most_often_along_its_own_axis(grid):
    places = torch.stack(
        torch.meshgrid(*[torch.arange(n) for n in grid.shape], indexing="ij"), dim=-1
    ).flatten(0, -2)
    for axis, visited in zip(reversed(range(len(grid.shape))), visits(grid), strict=True):
        assert visited[: grid.prefix] == list(range(grid.prefix))
        steps = places[torch.tensor(visited[grid.prefix :]) - grid.prefix].diff(dim=0).abs()
        assert (steps.sum(dim=-1) == 1).all()
        along = grid.shape[axis]
        assert steps[:, axis].sum() == (along - 1) * math.prod(grid.shape) // along


def test_an_order_made_for_inference_serves_training():
    grid = Grid((2, 7))
    with torch.inference_mode():
        snake_orders(grid, CPU)
    x = torch.randn(14, requires_grad=True)
    x[snake_orders(grid, CPU)[0].token].sum().backward()
    assert torch.equal(x.grad, torch.ones(14))


def test_scan_orders_do_not_leak_fake_tensors():
    grid = Grid((3, 5))
    with FakeTensorMode():
        assert is_fake(snake_orders(grid, CPU)[0].token)
    assert not any(is_fake(x) for order in snake_orders(grid, CPU) for x in order)
