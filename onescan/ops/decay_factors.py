"""Decay factors between the tokens of a chunk, and the scores of queries and keys after decay.

Log-decays may be -inf. Their cumulative sums stay finite, so that no difference of two sums is NaN,
and no factor exceeds 1.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.numerics import MIN_DIVISOR, accumulation_dtype, to_float64

MIN_LOG_DECAY = -800.0  # exp of anything smaller is 0 in every dtype
LOG_MIN_DIVISOR = math.log(MIN_DIVISOR)


def padded(tokens: int) -> int:
    """Round the number of tokens up to a power of two, as chunks with diagonal decay require.

    >>> padded(64), padded(197)
    (64, 256)
    """
    return 1 << (tokens - 1).bit_length()


class DecayFactors(NamedTuple):
    """Decay factors of one direction within a chunk, [..., C or 1, X].

    Attributes:
        enter: From the incoming state to each token.
        leave: From each token to the outgoing state.
        through: From the incoming to the outgoing state.
    """

    enter: Tensor
    leave: Tensor
    through: Tensor


def _sums(log_decay: Tensor, *, backward: bool) -> Tensor:
    """Compute cumulative log-decays [..., C, X], starting where the direction enters the chunk.

    The sums are float64, so that differences of two sums, the decays between nearby tokens, stay
    accurate when the sums are large.
    """
    logs = to_float64(log_decay).clamp(min=MIN_LOG_DECAY)
    sums = logs.cumsum(-2)
    return sums[..., -1:, :] - sums + logs if backward else sums


def decay_factors(log_decay: Tensor, dtype: torch.dtype, *, backward: bool) -> DecayFactors:
    """Return the decay factors of log-decays [..., C, X] in a dtype; `through` in float32 or wider.

    >>> log_decay = torch.tensor([[0.5], [0.25]]).log()
    >>> [x.flatten().tolist() for x in decay_factors(log_decay, torch.float32, backward=False)]
    [[0.5, 0.125], [0.25, 1.0], [0.125]]
    """
    sums = _sums(log_decay, backward=backward)
    end = sums[..., :1, :] if backward else sums[..., -1:, :]
    through = exp_decay(end, accumulation_dtype(dtype))
    return DecayFactors(exp_decay(sums, dtype), exp_decay(end - sums, dtype), through)


def exp_decay(logs: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the exponential in a dtype. Except in float64, results below `MIN_DIVISOR` become 0.

    Products with smaller factors can be subnormal in float32, which is many times slower on a CPU.

    >>> exp_decay(torch.tensor([0.0, -80.0, -torch.inf]), torch.float32).tolist()
    [1.0, 0.0, 0.0]
    """
    logs = logs.to(accumulation_dtype(dtype))
    if dtype != torch.float64:
        logs = F.threshold(logs, LOG_MIN_DIVISOR, -torch.inf)
    return logs.exp().to(dtype)


def decayed_scores(q: Tensor, k: Tensor, logs: Sequence[Tensor]) -> tuple[Tensor, Any]:
    """Return the scores after decay, [..., C, C], and the decay factors needed for gradients."""
    sums = [_sums(x, backward=bool(d)) for d, x in enumerate(logs)]
    if logs[0].shape[-1] == 1:
        decays = _scalar_decays(sums, q.dtype)
        return q @ k.mT * decays, decays
    levels = [list(_levels(x, q.dtype, backward=bool(d))) for d, x in enumerate(sums)]
    return _diagonal_scores(q, k, levels), levels


def _scalar_decays(sums: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return exp(sum_i - sum_j), [..., C, C], for the direction in which i reads j."""
    below, *above = (_differences(x, accumulation_dtype(dtype)) for x in sums)
    size = below.shape[-1]
    is_below = torch.ones(size, size, dtype=torch.bool, device=below.device).tril()
    other = above[0] if above else below.new_full((), -torch.inf)
    return exp_decay(torch.where(is_below, below, other), dtype)


def _differences(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute sum_i - sum_j, [..., C, C], to the precision of dtype.

    Float64 sums are split into two parts of the dtype, which are faster to subtract.
    """
    if sums.dtype == dtype:
        return sums - sums.mT
    high = sums.to(dtype)
    low = (sums - high).to(dtype)
    return (high - high.mT) + (low - low.mT)


# If each key channel has its own decay, scores cannot be multiplied by the decay afterwards. Chunks
# are split into halves recursively. Between a query in the half visited second and a key in the
# half visited first, the decay is the decay from the key to the boundary m between the halves,
# times the decay from the boundary to the query. Both factors are at most 1 and cannot overflow.
#
#     W_ij = sum_c q_ic exp(sum_ic - sum_mc) k_jc exp(sum_mc - sum_jc)


def _levels(sums: Tensor, dtype: torch.dtype, *, backward: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the decays of queries and keys, [..., S, L, K], for halves of 1, 2, 4, ... tokens."""
    length = 1
    while length < sums.shape[-2]:
        first, second = halves(sums, length, backward=backward)
        boundary = first[..., :1, :] if backward else first[..., -1:, :]
        yield exp_decay(second - boundary, dtype), exp_decay(boundary - first, dtype)
        length *= 2


def halves(x: Tensor, length: int, *, backward: bool) -> tuple[Tensor, Tensor]:
    """Split tiles into the halves visited first and second, [..., S, L, X] each."""
    left, right = x.unflatten(-2, (-1, 2, length)).unbind(-3)
    return (right, left) if backward else (left, right)


def _diagonal_scores(
    q: Tensor, k: Tensor, levels: Sequence[Sequence[tuple[Tensor, Tensor]]]
) -> Tensor:
    """Assemble the scores, from tiles of one token up to the whole chunk."""
    scores = (q * k).sum(-1)[..., None, None]  # [..., S, L, L]
    for level in zip(*levels, strict=True):
        length = scores.shape[-1]
        blocks = []
        for d, (enter, leave) in enumerate(level):
            _, queries = halves(q, length, backward=bool(d))
            keys, _ = halves(k, length, backward=bool(d))
            blocks.append((queries * enter) @ (keys * leave).mT)
        lower, upper = [*blocks, torch.zeros_like(blocks[0])][:2]
        first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
        rows = torch.cat([first, upper], dim=-1), torch.cat([lower, second], dim=-1)
        scores = torch.cat(rows, dim=-2)
    return scores.squeeze(-3)
