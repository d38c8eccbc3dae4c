"""One stretch of tokens as attention, all scores of both directions at once.

    score_ij = sum_c q_ic k_jc exp(sum of forward_c over j < l <= i)     below the diagonal
    score_ij = sum_c q_ic k_jc exp(sum of backward_c over i <= l < j)    above it; 0 where causal

Two neighbouring stretches make one of twice the length. Where a query in one meets a key in the
other, the decay between them is what leaves the key's stretch times what enters the query's. Both
are at most 1, so nothing overflows, and no quotient or difference of sums loses what lies between
two tokens. A scalar decay is a factor of the score; a diagonal one is a factor of query and key,
which are multiplied afterwards.

Letters of this file: S stretches side by side, of L tokens each; X is 1, or K where diagonal.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.decay_attention.blocks import Factors, assembled, masked_sums

LEAF = 25  # the first stretches of a scalar decay have at most so many tokens
FUSED = 128  # and so many in compiled programs, which need not hold the masks between two steps
VANISHED = -800.0  # exp of less is 0 in every type


class Reach(NamedTuple):
    """How much is left, in one direction, of what passes through a stretch.

    Attributes:
        enter: of what enters, at each token, [..., S, L, X].
        leave: of each token, where it leaves, [..., S, L, X].
        through: of what enters, where it leaves, [..., S, 1, X].
    """

    enter: Tensor
    leave: Tensor
    through: Tensor


class Tile(NamedTuple):
    """A stretch of tokens summed up.

    Attributes:
        o: the sum of values under the scores, [..., L, V].
        forward: reach of what comes from the left, without the axis S.
        backward: reach of what comes from the right; None where causal.
    """

    o: Tensor
    forward: Reach
    backward: Reach | None


def leaf_length(tokens: int, *, is_diagonal: bool) -> int:
    """Tokens of the first stretches, 1 where diagonal; doubled often enough, they hold `tokens`."""
    most = LEAF
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        most = FUSED
    while tokens > (1 if is_diagonal else most):
        tokens = -(-tokens // 2)
    return tokens


def padded(tokens: int, *, is_diagonal: bool) -> int:
    """How many tokens a stretch is filled up to: a first stretch doubled so many times.

    >>> padded(64, is_diagonal=False), padded(197, is_diagonal=False), padded(197, is_diagonal=True)
    (64, 200, 256)
    """
    length = leaf_length(tokens, is_diagonal=is_diagonal)
    while length < tokens:
        length *= 2
    return length


def tile(q: Tensor, k: Tensor, v: Tensor, forward: Tensor, backward: Tensor | None) -> Tile:
    """Let every query meet every key.

    Args:
        q: queries, [..., L, K], L as `padded` says.
        k: keys, [..., L, K].
        v: values, [..., L, V].
        forward: log-decays from the left, [..., L, X].
        backward: log-decays from the right; None where causal.
    """
    size, is_diagonal = q.shape[-2], forward.shape[-1] > 1
    leaf = leaf_length(size, is_diagonal=is_diagonal)
    forward = forward.unflatten(-2, (-1, leaf))
    backward = None if backward is None else backward.unflatten(-2, (-1, leaf))
    weigh = (q, k) if is_diagonal else None
    below, left = _grown(_leaf_reach(forward), size, weigh)
    above, right = None, None
    if backward is not None:
        reach = Reach(*(x.flip(-2) for x in _leaf_reach(backward.flip(-2))))
        above, right = _grown(reach, size, weigh, backward=True)
    if is_diagonal:
        scores = assembled((q * k).sum(-1)[..., None, None], below, above)
        return Tile(scores @ v, left, right)
    return Tile(masked_sums(q, k, v, _leaf_mask(forward, backward), below, above), left, right)


def _grown(
    reach: Reach, size: int, weigh: tuple[Tensor, Tensor] | None, *, backward: bool = False
) -> tuple[list[Factors], Reach]:
    """Double the stretches until there is one.

    Args:
        reach: of the first stretches, in one direction.
        size: tokens of the last one.
        weigh: queries and keys, [..., size, K], for a diagonal decay to weigh.
        backward: whether the right one of two is visited first.

    Returns:
        For each doubling the factors of what queries of the stretch visited second see of keys of
        the first; and the last one's reach, without the axis S.
    """
    order = -1 if backward else 1
    levels = []
    while (length := reach.enter.shape[-2]) < size:
        first, second = _neighbours(reach)[::order]
        rows, columns = second.enter, first.leave
        if weigh is not None:
            q, k = (x.unflatten(-2, (-1, 2, length)).unbind(-3)[::order] for x in weigh)
            rows, columns = q[1] * rows, k[0] * columns
        levels.append((rows, columns))
        enter = first.enter, first.through * second.enter
        leave = first.leave * second.through, second.leave
        reach = Reach(
            torch.cat(enter[::order], dim=-2),
            torch.cat(leave[::order], dim=-2),
            first.through * second.through,
        )
    return levels, Reach(*(x.squeeze(-3) for x in reach))


def _neighbours(reach: Reach) -> tuple[Reach, Reach]:
    """The left and the right one of each two stretches."""
    left, right = zip(*(x.unflatten(-3, (-1, 2)).unbind(-3) for x in reach), strict=True)
    return Reach(*left), Reach(*right)


def _leaf_reach(log_decay: Tensor) -> Reach:
    """Of the first stretches, from the left."""
    enter = log_decay.cumsum(-2).exp()
    later = F.pad(log_decay[..., 1:, :], (0, 0, 0, 1))
    return Reach(enter, _cumsum_back(later).exp(), enter[..., -1:, :])


def _leaf_mask(forward: Tensor, backward: Tensor | None) -> Tensor:
    """A scalar decay between any two tokens of a first stretch, [..., S, L, L].

    The one place that takes differences of sums: of few tokens, in float64.
    """
    total = forward.double().clamp(min=VANISHED).cumsum(-2)
    logs = total - total.mT
    above = torch.ones(logs.shape[-2:], dtype=torch.bool, device=logs.device).triu(1)
    if backward is None:
        logs = logs.masked_fill(above, -torch.inf)
    else:
        total = _cumsum_back(backward.double().clamp(min=VANISHED))
        logs = torch.where(above, total - total.mT, logs)
    return logs.to(forward.dtype).exp()


def _cumsum_back(x: Tensor) -> Tensor:
    """Sums from each token to the last."""
    return x.flip(-2).cumsum(-2).flip(-2)
