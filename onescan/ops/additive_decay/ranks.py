"""States of additive decay over the ranks of a process group; see `onescan.ops.parallel`.

Not causal, every rank needs the state of all tokens, which one all-reduce of normalizers and means
merges. Causal, it needs the state of the tokens before its own.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from onescan.ops.additive_decay.state import AdditiveDecayState, per_feature, per_key, share
from onescan.ops.numerics import LOG_ZERO
from onescan.ops.parallel import SequenceGroup, gather


def merged_over_ranks(group: SequenceGroup, state: AdditiveDecayState) -> AdditiveDecayState:
    """Merge the canonical states of all ranks."""
    return AdditiveDecayState(*_Merge.apply(group, *state))


def merged_before(
    group: SequenceGroup, state: AdditiveDecayState
) -> tuple[AdditiveDecayState, AdditiveDecayState]:
    """Merge the canonical states of the earlier ranks, and those of all ranks."""
    z, kv = gather(group, *state)
    is_earlier = torch.arange(group.size, device=z.device).view(-1, 1, 1, 1) < group.rank
    return _sum(z, kv, is_earlier), _sum(z, kv, torch.ones_like(is_earlier))


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
    dist.all_reduce(flat, group=group.group)
    parts = flat.split([x.numel() for x in tensors])
    return tuple(part.view(x.shape) for part, x in zip(parts, tensors, strict=True))
