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
    o = torch.einsum("bthk,bhkv->bthv", q, own + left + right)
    return Results(parted(o, divide), leaves)
