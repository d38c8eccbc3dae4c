"""Decayed attention as attention: every query meets every key under a mask, O(T^2).

Source: LION, arXiv:2502.16249, Eq. 14 (scalar decay), Theorem B.1 (diagonal decay).
"""

from onescan.ops.decay_attention import chunk
from onescan.ops.decay_attention.directions import Directions, Divide, Matrices, Results
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
    # one chunk holds the whole sequence
    size = k.shape[1]
    return chunk.forward(
        q, k, v, decays, enters, chunk_size=size, return_state=return_state, divide=divide
    )
