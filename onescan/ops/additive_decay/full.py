"""Additive decay as attention: every query meets every key, O(T^2)."""

import torch

from onescan.ops.additive_decay import chunk
from onescan.ops.additive_decay.one_scan import summary, turn_of
from onescan.ops.additive_decay.state import AdditiveDecayState, merged, per_feature, share
from onescan.ops.lrpe import lrpe
from onescan.shapes import Angles, Keys, Queries, Values


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    angles: Angles | None,
    state: AdditiveDecayState | None,
    *,
    chunk_size: int,
) -> tuple[Values, AdditiveDecayState]:
    context = summary(k, v, *turn_of(angles, k))
    if state is not None:
        context = merged(state, context)
    z = context.log_normalizer.unsqueeze(1)  # B 1 H K
    weight = (k.double() - z).exp().to(k.dtype)
    if angles is not None:
        q, weight = lrpe(q, angles), lrpe(weight, angles)
    o = torch.einsum("bthf,bshf,bshv->bthv", q, weight, v)
    if state is not None:
        before = per_feature(share(state.log_normalizer, context.log_normalizer, q), state.kv)
        o = o + torch.einsum("bthf,bhfv->bthv", q, state.kv * before)
    return o, context


def causal_forward(
    q: Queries,
    k: Keys,
    v: Values,
    angles: Angles | None,
    state: AdditiveDecayState | None,
    *,
    chunk_size: int,
) -> tuple[Values, AdditiveDecayState]:
    # one chunk holds the whole sequence
    return chunk.forward(q, k, v, angles, state, chunk_size=k.shape[1])
