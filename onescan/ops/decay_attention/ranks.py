"""States of linear attention with decay over the ranks of a group; see `onescan.ops.parallel`.

The tokens of a rank update the incoming state S of one direction as S' = P S + U.
"""

import torch
from torch import Tensor

from onescan.ops.collectives import carry, linear_compose, linear_step
from onescan.ops.decay_attention.forms import Directions, Sides, updates_of
from onescan.ops.parallel import SequenceGroup
from onescan.shapes import Keys, Values


def carried_states(
    ranks: SequenceGroup, k: Keys, v: Values, decays: Directions, ends: Sides, sides: Sides
) -> tuple[Sides, Sides]:
    """Return the states that enter this rank from both sides, and those of the whole sequence.

    States are matrices with a column of sums of keys, [B, H, K, V + 1], and None for a direction
    that does not exist.

    Args:
        ranks: The ranks.
        k: Keys, zero for masked tokens.
        v: Values.
        decays: Log-decays of each direction.
        ends: Log-decay of each direction after the last token visited, if any.
        sides: States before the first rank and after the last one, read there; None for zeros.
    """
    is_outermost = ranks.is_first, ranks.is_last
    enters = [side if here else None for side, here in zip(sides, is_outermost, strict=True)]
    updates = [
        (own if enter is None else torch.addcmul(own, kept, enter), kept)
        for (own, kept), enter in zip(updates_of(k, v, decays, ends), enters, strict=False)
    ]
    states = carry(ranks, updates, (torch.zeros_like(updates[0][0]),), linear_step, linear_compose)
    entering: list[Tensor | None] = [None, None]
    leaving: list[Tensor | None] = [None, None]
    for d, (((before,), (last,)), enter) in enumerate(zip(states, enters, strict=False)):
        entering[d], leaving[d] = before if enter is None else before + enter, last
    return (entering[0], entering[1]), (leaving[0], leaving[1])
