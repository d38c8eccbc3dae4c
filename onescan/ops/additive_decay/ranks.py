"""States of additive decay over the ranks of a process group; see `onescan.ops.parallel`.

If not causal, every rank needs the state of all tokens, merged by all-reduces. If causal, it needs
the state of the tokens before its own.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from onescan.ops.additive_decay.state import (
    AdditiveDecayState,
    merged,
    per_feature,
    per_key,
    share,
)
from onescan.ops.collectives import State, carry, gather
from onescan.ops.numerics import LOG_ZERO
from onescan.ops.packing import PackingShard
from onescan.ops.parallel import SequenceGroup, explain_failure


def merged_over_ranks(group: SequenceGroup, state: AdditiveDecayState) -> AdditiveDecayState:
    """Merge the canonical states of all ranks."""
    return AdditiveDecayState(*_Merge.apply(group, *state))


def merged_before(
    group: SequenceGroup, state: AdditiveDecayState, packing: PackingShard | None = None
) -> tuple[AdditiveDecayState, AdditiveDecayState]:
    """Merge the canonical states of earlier ranks, and those of all ranks.

    With packed sequences, the states are those of the last sequence of each row on each rank, and
    the first result is the state of the sequence that continues on this rank.
    """
    empty = torch.full_like(state.log_normalizer, LOG_ZERO), torch.zeros_like(state.kv)
    update = tuple(state)
    if packing is not None:
        update += (~packing.starts.any(dim=1)[:, None, None],)  # whether a sequence continues
    ((before, last),) = carry(group, [update], empty, _step, _compose)
    if packing is not None:
        before = _where(~packing.starts[:, :1, None], before)
    return AdditiveDecayState(*before), AdditiveDecayState(*last)


def _step(state: State, update: State) -> State:
    """Merge an update with the state of earlier tokens, unless a new sequence has begun."""
    z, kv, *continues = update
    for is_same in continues:
        state = _where(is_same, state)
    return merged(AdditiveDecayState(*state), AdditiveDecayState(z, kv))


def _compose(first: State, second: State) -> State:
    """Combine two consecutive updates into one."""
    continues = (a & b for a, b in zip(first[2:], second[2:], strict=True))
    return *_step(first[:2], second), *continues


def _where(included: Tensor, state: State) -> State:
    """Return an empty state where not included, [B, 1, 1]."""
    z, kv = state
    return z.where(included, LOG_ZERO), kv.where(included.unsqueeze(-1), 0)


def merged_sequences(
    group: SequenceGroup, states: AdditiveDecayState, packing: PackingShard
) -> tuple[AdditiveDecayState, AdditiveDecayState]:
    """Merge the states of the sequences at both ends of the rank's rows with those on other ranks.

    Args:
        group: The ranks.
        states: States of the rank's tokens of each sequence, [S, ...].
        packing: The sequences.

    Returns:
        States of the whole sequences that contain the first and the last token of each row of this
        rank, [B, ...].
    """
    at = packing.sequence[:, [0, -1]].mT  # 2 B
    z, kv = (x.flatten(0, 1) for x in gather(group, *(x[at] for x in states)))
    # a sequence that is both the first and the last one counts once
    tails = packing.tails.masked_fill(packing.tails == packing.heads, -2)
    numbers = torch.stack([packing.heads, tails], dim=1).flatten(0, 1)  # 2W B
    ends = packing.heads[group.rank], packing.tails[group.rank]
    head, tail = (_sum(z, kv, (numbers == number)[:, :, None, None]) for number in ends)
    return head, tail


def _sum(z: Tensor, kv: Tensor, included: Tensor) -> AdditiveDecayState:
    """Merge some of the states z, [W, B, H, K], and kv, [W, B, H, F, V]."""
    z = z.where(included, LOG_ZERO)
    total = z.logsumexp(0)
    kv = kv.where(included.unsqueeze(-1), 0)
    return AdditiveDecayState(total, (per_feature(share(z, total, kv), kv) * kv).sum(0))


class _Merge(torch.autograd.Function):
    """Compute z = log sum_r exp(z_r) and kv = sum_r exp(z_r - z) kv_r over the ranks r.

    With dz and dkv summed over the ranks:

        dz_r = exp(z_r - z) (dz + <kv_r - kv, dkv>),   dkv_r = exp(z_r - z) dkv
    """

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, z: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        ctx.group, peak = group, z.clone()
        with explain_failure(group):
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group.group)
        weight = share(z, peak, kv)
        total, merged = _sums(group, weight, per_feature(weight, kv) * kv)
        merged /= per_feature(total, kv)
        ctx.save_for_backward(weight / total, kv, merged)
        return peak + total.to(peak.dtype).log(), merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, dkv: Tensor) -> tuple[Tensor | None, ...]:
        fraction, kv, merged = ctx.saved_tensors
        total, dkv = _sums(ctx.group, dz.to(kv.dtype), dkv)
        dz_rank = fraction * (total + per_key((kv - merged) * dkv, fraction))
        return None, dz_rank.to(dz.dtype), per_feature(fraction, kv) * dkv


def _sums(group: SequenceGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Sum tensors of one dtype over the ranks, in one collective without gradients."""
    flat = torch.cat([x.flatten() for x in tensors])
    with explain_failure(group):
        dist.all_reduce(flat, group=group.group)
    parts = flat.split([x.numel() for x in tensors])
    return tuple(part.view(x.shape) for part, x in zip(parts, tensors, strict=True))
