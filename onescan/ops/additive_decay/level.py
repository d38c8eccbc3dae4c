"""Causal additive decay in chunks, for logits that climb little: one reference serves them all.

    w_s = exp(k_s - r),   n_t = sum_{s <= t} w_s
    o_t = R(q_t / n_t)^T sum_{s <= t} R(w_s) v_s^T

with r the largest logit of each channel, or what the state holds if that is larger. This is linear
attention without decay. The first token has the smallest n_t: where logits climb from there by
more than MOST_CLIMB, 1 / n_t leaves too little of float32's range, and `climbing` has to serve.

Source: LightNet, arXiv:2405.21022, Eq. 13.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from onescan.ops.additive_decay.state import AdditiveDecayState, per_feature, share
from onescan.ops.additive_decay.triangle import rotated
from onescan.ops.chunks import linear_scan
from onescan.ops.numerics import LOG_ZERO
from onescan.shapes import Angles, Keys, Queries, Values

MOST_CLIMB = 40.0  # second derivatives divide by the square of exp(-MOST_CLIMB)


class Weights(NamedTuple):
    """Keys as weights under one reference.

    Attributes:
        reference: r, [B, H, K].
        before: the state's weight under it, [B, H, K]; None where there is no state.
        own: w, [B, H, T, K].
        total: n, what came before included, [B, H, T, K].
    """

    reference: Tensor
    before: Tensor | None
    own: Tensor
    total: Tensor


def weigh(k: Keys, state: AdditiveDecayState | None) -> Weights | None:
    """Weigh the keys; None where their logits climb too far for that."""
    k = _by_head(k)
    # the result does not depend on the reference, so no gradient flows through it
    reference = k.detach().amax(dim=2).clamp(min=LOG_ZERO)
    if state is not None:
        reference = reference.maximum(state.log_normalizer.detach().to(k.dtype))
    own = (k - reference.unsqueeze(2)).exp()
    total, before = own.cumsum(dim=2), None
    if state is not None:
        # float32's LOG_ZERO is lower, so that nothing would weigh infinitely more than nothing
        before = share(state.log_normalizer, reference.double().clamp(min=LOG_ZERO), k)
        total = total + before.unsqueeze(2)
    least = math.exp(-MOST_CLIMB)
    if total.numel() and total.detach().amin() < least:
        reads_something = k.detach().cummax(dim=2).values > -torch.inf
        if state is not None:
            reads_something |= state.log_normalizer.unsqueeze(2) > LOG_ZERO
        if ((total < least) & reads_something).any():
            return None
        total = total.clamp(min=least)
    return Weights(reference, before, own, total)


def forward(
    q: Queries,
    weights: Weights,
    v: Values,
    angles: Angles | None,
    state: AdditiveDecayState | None,
    *,
    chunk_size: int,
) -> tuple[Values, AdditiveDecayState]:
    tokens = q.shape[1]
    count = -(-tokens // chunk_size)
    turn = None  # cos and sin, H T K
    if angles is not None:
        angles = rearrange(angles, "t h k -> h t k").contiguous().to(q.dtype)
        turn = (angles.cos(), angles.sin())
    log_total = weights.total.log()
    p = rotated(_by_head(q) * (-log_total).exp(), turn)
    w = rotated(weights.own, turn)
    p, w, v = (_chunks(x, count) for x in (p, w, _by_head(v)))  # B H N C .

    kv_chunk = w.mT @ v  # B H N F V
    kv = torch.zeros_like(kv_chunk[:, :, 0])
    if state is not None and weights.before is not None:
        kv = state.kv * per_feature(weights.before, state.kv)
    kv_before, kv = linear_scan(kv, kv_chunk)

    o = (p @ w.mT).tril_() @ v
    if count > 1 or state is not None:
        o = o + p @ kv_before
    o = rearrange(o, "b h n c v -> b (n c) h v").narrow(1, 0, tokens)
    z = log_total[:, :, -1]
    kv = kv * per_feature((-z).exp(), kv)
    return o, AdditiveDecayState(weights.reference.double() + z.double(), kv)


def _by_head(x: Tensor) -> Tensor:
    return rearrange(x, "b t h x -> b h t x").contiguous()


def _chunks(x: Tensor, count: int) -> Tensor:
    """Cut [B, H, T, X] into chunks of equal size; what the last one lacks is 0."""
    missing = -x.shape[2] % count
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return x.unflatten(2, (count, -1))
