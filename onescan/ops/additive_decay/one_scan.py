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
    context = summary(k, v, angles)
    if state is not None:
        context = merged(state, context)
    way = by_sample if by_sample.pays(q, context.kv, angles) else all_at_once
    return way.read_out(q, context.kv, *_turn(angles, q)), context


def summary(k: Keys, v: Values, angles: Angles | None) -> AdditiveDecayState:
    """The state of these tokens alone."""
    way = by_sample if by_sample.pays(k, v, angles) else all_at_once
    return AdditiveDecayState(*way.summary(k, v, *_turn(angles, k)))


def _turn(angles: Angles | None, like: Keys) -> tuple[Angles, Angles] | tuple[None, None]:
    """Cosines and sines, in the type they are multiplied in."""
    if angles is None:
        return None, None
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
