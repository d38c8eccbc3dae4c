"""States of additive decay over the ranks of a process group; see `onescan.ops.parallel`.

If not causal, every rank needs the state of all tokens, merged by all-reduces. If causal, it needs
the state of the tokens before its own.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from onescan.ops.additive_decay.state import AdditiveDecayState, per_feature, per_key, share
from onescan.ops.numerics import LOG_ZERO
from onescan.ops.packing import PackingShard
from onescan.ops.parallel import SequenceGroup, explain_failure, gather


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
    z, kv = gather(group, *state)
    is_earlier = torch.arange(group.size, device=z.device).view(-1, 1, 1, 1) < group.rank
    included = is_earlier
    if packing is not None:
        is_same = packing.tails == packing.heads[group.rank]
        included = is_earlier & is_same[:, :, None, None]
    return _sum(z, kv, included), _sum(z, kv, torch.ones_like(is_earlier))


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
        own, kv, merged = ctx.saved_tensors
        total, dkv = _sums(ctx.group, dz.to(kv.dtype), dkv)
        slope = own * (total + per_key((kv - merged) * dkv, own))
        return None, slope.to(dz.dtype), per_feature(own, kv) * dkv


def _sums(group: SequenceGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Sum tensors of one dtype over the ranks, in one collective without gradients."""
    flat = torch.cat([x.flatten() for x in tensors])
    with explain_failure(group):
        dist.all_reduce(flat, group=group.group)
    parts = flat.split([x.numel() for x in tensors])
    return tuple(part.view(x.shape) for part, x in zip(parts, tensors, strict=True))
