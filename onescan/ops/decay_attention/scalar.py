"""Scores of a chunk whose tokens have one decay each, which is a factor of the score.

    score_ij = q_i . k_j  exp(sum of forward over j < l <= i)      below the diagonal
    score_ij = q_i . k_j  exp(sum of backward over i <= l < j)     above it; 0 where causal

Each exponent is a difference of sums up to i and up to j. No decay is above 1, so on the other side
of the diagonal the same difference is 0 or more: of both directions' the lower one counts.

Source: LION, arXiv:2502.16249, Eq. 14.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.decay_attention.reach import left_of
from onescan.ops.decay_attention.scores import Out, Scores, product, times
from onescan.ops.numerics import doubled


def _prepared(q: Tensor, *totals: Tensor) -> tuple[Tensor, ...]:
    """Sums of log-decays, forward and unless causal backward: each rounded, and what that left."""
    made: list[Tensor] = []
    for total in totals:
        rounded = total.to(q.dtype)
        made += [rounded, (total - rounded).to(q.dtype)]
    return tuple(made)


def _weights(q: Tensor, k: Tensor, *sums: Tensor, in_place: bool) -> Tensor:
    decays = _decays(*sums, in_place=in_place)  # first, so that scores have memory it used
    return _decayed(q @ k.mT, decays, *sums, in_place=in_place)


def _slopes(
    dweights: Tensor,
    q: Tensor,
    k: Tensor,
    *sums: Tensor,
    of_others: bool,
    in_place: bool,
    out: Out = (None, None),
) -> tuple[Tensor, ...]:
    decays = _decays(*sums, in_place=in_place)
    weights = _decayed(q @ k.mT, decays, *sums, in_place=in_place)
    dscores = _decayed(decays, dweights, *sums, in_place=in_place)
    made = weights, product(dscores, k, out[0]), product(dscores.mT, q, out[1])
    if not of_others:
        return made
    dexponents = times(dweights, weights, in_place=in_place)
    return *made, *_crossing(dexponents, dscores if in_place else None, causal=_is_causal(sums))


def _decays(*sums: Tensor, in_place: bool) -> Tensor:
    """The factor of each score, [..., C, C]; where causal, any number above the diagonal.

    Sums are subtracted as they were rounded, which is exact to the last digit of the difference,
    and then the rest: no decay between near tokens is lost beside those far before them.
    """
    pairs = zip(sums[::2], sums[1::2], strict=True)
    first, *others = (_differences(*pair, in_place=in_place) for pair in pairs)
    other = others[0] if others else first.new_zeros(())  # where causal, `_decayed` leaves it out
    if in_place:
        return left_of(torch.minimum(first, other, out=first), in_place=True)
    return left_of(torch.minimum(first, other))


def _differences(rounded: Tensor, rest: Tensor, *, in_place: bool) -> Tensor:
    difference = rounded - rounded.mT
    if in_place:
        return difference.add_(rest).sub_(rest.mT)
    return difference + rest - rest.mT


def _decayed(x: Tensor, decays: Tensor, *sums: Tensor, in_place: bool) -> Tensor:
    """Multiplied; where causal, what is above the diagonal becomes 0."""
    x = times(x, decays, in_place=in_place)
    if not _is_causal(sums):
        return x
    return x.tril_() if in_place else x.tril()


def _is_causal(sums: Sequence[Tensor]) -> bool:
    """Whether they are those of one direction."""
    return len(sums[::2]) == 1


def _crossing(x: Tensor, room: Tensor | None, *, causal: bool) -> Iterator[Tensor]:
    """Gradients of sums of log-decays, from those of exponents, in float64.

    A log-decay's own is the sum over all pairs of tokens between which it lies: of token l forward
    those with j < l <= i, backward those with i <= l < j. It is taken as such first, and only then
    come differences: a small one is as exact as a large one.

    Args:
        x: gradients of exponents, [..., C, C].
        room: memory of that size for what comes in between, if there is.
        causal: whether there is but one direction.
    """
    before = torch.cumsum(x, -1, out=room)
    below = before.tril(-1) if room is None else before.tril_(-1)
    after = doubled(F.pad(below.sum(-2)[..., :-1], (1, 0)).unsqueeze(-1))
    yield after - F.pad(after[..., 1:, :], (0, 0, 0, 1))
    if causal:
        return
    up_to = torch.cumsum(x, -2, out=room)
    above = up_to.triu(1) if room is None else up_to.triu_(1)
    across = doubled(above.sum(-1, keepdim=True))
    yield across - F.pad(across[..., :-1, :], (0, 0, 1, 0))


MASKED = Scores(_prepared, _weights, _slopes)
