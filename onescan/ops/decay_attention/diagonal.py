"""Scores of a chunk whose key channels have one decay each: factors of queries and keys.

    score_ij = sum_c q_ic k_jc exp(sum of forward_c over j < l <= i)     below the diagonal
    score_ij = sum_c q_ic k_jc exp(sum of backward_c over i <= l < j)    above it; 0 where causal

Two neighbouring stretches of tokens make one of twice the length. Where a query in one meets a key
in the other, the decay between them is what leaves the key's stretch times what enters the query's.
Both are at most 1, so nothing overflows, and no quotient or difference of sums loses what lies
between two tokens.

Letters of this file: S stretches side by side, of L tokens each.

Source: LION, arXiv:2502.16249, Theorem B.1.
"""

import torch
from torch import Tensor

from onescan.ops.decay_attention.blocks import Factors, assembled
from onescan.ops.decay_attention.reach import Reach
from onescan.ops.decay_attention.scores import Out, Scores


def padded(tokens: int) -> int:
    """How many tokens a chunk is filled up to: a power of two.

    >>> padded(64), padded(197)
    (64, 256)
    """
    return 1 << (tokens - 1).bit_length()


def scores_of(
    q: Tensor, k: Tensor, forward: Tensor, backward: Tensor | None = None
) -> tuple[Tensor, list[Reach]]:
    """Scores of every query with every key, and how far a state and a token reach.

    Args:
        q: queries, [..., C, K], C a power of two.
        k: keys, likewise.
        forward: log-decays from the left, likewise.
        backward: log-decays from the right; None where causal.

    Returns:
        [..., C, C], and of each direction its reach.
    """
    below, left = _grown(_of_one(forward), q, k)
    reaches, above = [left], None
    if backward is not None:
        above, right = _grown(_of_one(backward), q, k, backward=True)
        reaches.append(right)
    return assembled((q * k).sum(-1)[..., None, None], below, above), reaches


def _grown(
    reach: Reach, q: Tensor, k: Tensor, *, backward: bool = False
) -> tuple[list[Factors], Reach]:
    """Double the stretches until there is one.

    Args:
        reach: of the first stretches, in one direction, [..., S, L, K].
        q: queries, [..., C, K].
        k: keys, likewise.
        backward: whether the right one of two is visited first.

    Returns:
        For each doubling the factors of what queries of the stretch visited second see of keys of
        the first; and the last one's reach, without the axis S.
    """
    order = -1 if backward else 1
    levels = []
    while (length := reach.enter.shape[-2]) < q.shape[-2]:
        first, second = _neighbours(reach)[::order]
        queries, keys = (x.unflatten(-2, (-1, 2, length)).unbind(-3)[::order] for x in (q, k))
        levels.append((queries[1] * second.enter, keys[0] * first.leave))
        enter = first.enter, first.through * second.enter
        leave = first.leave * second.through, second.leave
        reach = Reach(
            torch.cat(enter[::order], dim=-2),
            torch.cat(leave[::order], dim=-2),
            first.through * second.through,
        )
    return levels, Reach(*(x.squeeze(-3) for x in reach))


def _of_one(log_decay: Tensor) -> Reach:
    """Of stretches of one token."""
    decay = log_decay.exp().unsqueeze(-2)
    return Reach(decay, torch.ones_like(decay), decay)


def _neighbours(reach: Reach) -> tuple[Reach, Reach]:
    """The left and the right one of each two stretches."""
    left, right = zip(*(x.unflatten(-3, (-1, 2)).unbind(-3) for x in reach), strict=True)
    return Reach(*left), Reach(*right)


def _prepared(q: Tensor, scores: Tensor) -> tuple[Tensor]:
    return (scores,)


def _weights(q: Tensor, k: Tensor, scores: Tensor, *, in_place: bool) -> Tensor:
    return scores


def _slopes(
    dweights: Tensor,
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    *,
    of_others: bool,
    in_place: bool,
    out: Out = (None, None),
) -> tuple[Tensor, ...]:
    """Queries and keys have no gradient here: theirs are those of what made the scores."""
    pairs = zip((q, k), out, strict=True)
    nothing = (torch.zeros_like(x) if into is None else into.zero_() for x, into in pairs)
    return scores, *nothing, *[dweights] * of_others


GIVEN = Scores(_prepared, _weights, _slopes)
