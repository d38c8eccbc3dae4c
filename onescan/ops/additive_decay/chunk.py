"""Causal additive decay in chunks: matrix products inside, one sum carried from chunk to chunk.

Eq. 13 unrolled is an undecayed causal sum under a running normalizer, so chunks need no gates.
Two files have it: `level`, where one reference serves all logits, as is usual, and `climbing`, for
any logits. Only the logits tell which: where values cannot be looked at, it is `climbing`.

Source: LightNet, arXiv:2405.21022, Eq. 13.
"""

from onescan.checks import can_look_at_values
from onescan.ops.additive_decay import climbing, level
from onescan.ops.additive_decay.state import AdditiveDecayState
from onescan.shapes import Angles, Keys, Queries, Values


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    angles: Angles | None,
    state: AdditiveDecayState | None,
    *,
    chunk_size: int,
) -> tuple[Values, AdditiveDecayState]:
    if can_look_at_values(k):
        weights = level.weigh(k, state)
        if weights is not None:
            return level.forward(q, weights, v, angles, state, chunk_size=chunk_size)
    return climbing.forward(q, k, v, angles, state, chunk_size=chunk_size)
