"""Decayed attention one token at a time: constant memory beside the outputs, for decoding.

Source: LION, arXiv:2502.16249, Eq. 5 and Theorem B.2.
"""

import torch
from torch import Tensor

from onescan.ops.decay_attention.directions import (
    Directions,
    Divide,
    Matrices,
    Results,
    entering,
    parted,
    with_ones,
)
from onescan.shapes import Keys, LogDecays, Queries, Values


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
    v = with_ones(v)
    left, right = enters
    o, left = _visited(q, k, v, decays.forward, entering(left, k, v), backward=False)
    if decays.backward is None:
        return Results(parted(o, divide), Matrices(left, None))
    o_right, right = _visited(q, k, v, decays.backward, entering(right, k, v), backward=True)
    return Results(parted(o + o_right, divide), Matrices(left, right))


def _visited(
    q: Queries, k: Keys, v: Values, log_decay: LogDecays, kv: Tensor, *, backward: bool
) -> tuple[Values, Tensor]:
    """Visit all tokens in one direction; backward, none reads itself, as forward it has."""
    rows, columns = (x.unsqueeze(-2) for x in (q, v))
    parts = (x.unbind(1) for x in (rows, k.unsqueeze(-1), columns, log_decay.exp().unsqueeze(-1)))
    order = -1 if backward else 1
    outputs = []
    for query, key, value, decay in list(zip(*parts, strict=True))[::order]:
        decayed = decay * kv
        kv = decayed + key * value
        outputs.append(query @ (decayed if backward else kv))  # B H 1 V
    return torch.cat(outputs[::order], dim=-2).transpose(1, 2), kv
