"""States of linear attention with decay over the ranks of a group; see `onescan.ops.parallel`.

The tokens of a rank update the incoming state S of one direction as S' = P S + U.
"""

import torch
from torch import Tensor

from onescan.ops.collectives import carry, linear_compose, linear_step
from onescan.ops.decay_attention.forms import Directions, PerDirection, updates_of
from onescan.ops.parallel import SequenceGroup
from onescan.shapes import Keys, Values


def carried_states(
    ranks: SequenceGroup,
    k: Keys,
    v: Values,
    decays: Directions,
    ends: PerDirection,
    states_in: PerDirection,
) -> tuple[PerDirection, PerDirection]:
    """Return the states that enter this rank from both sides, and those of the whole sequence.

    States are matrices with a column of sums of keys, [B, H, K, V + 1], and None for a direction
    that does not exist.

    Args:
        ranks: The ranks.
        k: Keys, zero for masked tokens.
        v: Values.
        decays: Log-decays of each direction.
        ends: Log-decay of each direction after the last token visited, if any.
        states_in: States before the first rank and after the last one, read there; None for zeros.
    """
    is_outermost = ranks.is_first, ranks.is_last
    outer_states = [
        state if is_outer else None for state, is_outer in zip(states_in, is_outermost, strict=True)
    ]
    updates = [
        (added if state is None else torch.addcmul(added, transition, state), transition)
        for (added, transition), state in zip(
            updates_of(k, v, decays, ends), outer_states, strict=False
        )
    ]
    states = carry(ranks, updates, (torch.zeros_like(updates[0][0]),), linear_step, linear_compose)
    entering: list[Tensor | None] = [None, None]
    final: list[Tensor | None] = [None, None]
    for d, (((before,), (last,)), state) in enumerate(zip(states, outer_states, strict=False)):
        entering[d], final[d] = before if state is None else before + state, last
    return (entering[0], entering[1]), (final[0], final[1])
