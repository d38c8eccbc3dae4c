"""Additive decay that is not causal: one sum over all tokens, in any order, gives the context.

    O = R(Q) [R(softmax(K))^T V]        softmax over tokens, per channel

Source: LightNet, arXiv:2405.21022, Eq. 14.
"""

from onescan.ops.additive_decay import all_at_once, by_sample
from onescan.ops.additive_decay.state import AdditiveDecayState, merged
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
    turn = turn_of(angles, k)
    context = summary(k, v, *turn)
    if state is not None:
        context = merged(state, context)
    way = by_sample if by_sample.pays(q, context.kv, *turn) else all_at_once
    return way.read_out(q, context.kv, *turn), context


def summary(k: Keys, v: Values, cos: Angles | None, sin: Angles | None) -> AdditiveDecayState:
    """The state of these tokens alone."""
    way = by_sample if by_sample.pays(k, v, cos) else all_at_once
    return AdditiveDecayState(*way.summary(k, v, cos, sin))


def turn_of(angles: Angles | None, like: Keys) -> tuple[Angles, Angles] | tuple[None, None]:
    """Cosines and sines, in the type they are multiplied in."""
    if angles is None:
        return None, None
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
