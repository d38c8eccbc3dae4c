"""Linear attention in both directions without decay: one sum over all tokens, in any order.

    Y = Q (K^T V)

Source: LION, arXiv:2502.16249, Eq. 181 to 183, LION-lit.
"""

import torch

from onescan.ops.decay_attention.directions import (
    Directions,
    Divide,
    Matrices,
    Results,
    parted,
    with_ones,
)
from onescan.ops.numerics import doubled
from onescan.shapes import Keys, Queries, Values


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    decays: Directions,
    enters: Matrices,
    *,
    chunk_size: int,
    return_state: bool,
    divide: Divide | None,
) -> Results:
    own = torch.einsum("bthk,bthv->bhkv", k, with_ones(v))
    left, right = (0 if side is None else side for side in enters)
    leaves = Matrices(own + left, own + right)
    total = own + left + right
    if divide is None or not divide.cancels:
        return Results(parted(torch.einsum("bthk,bhkv->bthv", q, total), divide), leaves)
    o = torch.einsum("bthk,bhkv->bthv", q, total[..., :-1])
    k_sum = doubled(k).sum(dim=1) + sum(side[..., -1] for side in enters if side is not None)
    row_sum = torch.einsum("bthk,bhk->bth", doubled(q), k_sum).to(q.dtype)
    return Results(divide(o, row_sum.unsqueeze(-1)), leaves)
