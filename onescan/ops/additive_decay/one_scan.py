"""Additive decay that is not causal: one sum over all tokens, in any order, gives the context.

    O = R(Q) [R(softmax(K))^T V]        softmax over tokens, per channel

Source: LightNet, arXiv:2405.21022, Eq. 14.
"""

import torch

from onescan.ops.additive_decay.state import AdditiveDecayState, merged
from onescan.ops.lrpe import lrpe
from onescan.ops.numerics import LOG_ZERO
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
    context = summary(k, v, angles)
    if state is not None:
        context = merged(state, context)
    rotated_q = q if angles is None else lrpe(q, angles)
    return torch.einsum("bthf,bhfv->bthv", rotated_q, context.kv), context


def summary(k: Keys, v: Values, angles: Angles | None) -> AdditiveDecayState:
    """The state of these tokens alone."""
    # the result does not depend on the maximum, so no gradient flows through it
    peak = k.detach().amax(dim=1).clamp(min=LOG_ZERO)  # B H K
    weight = (k - peak.unsqueeze(1)).exp_()
    total = weight.sum(dim=1)  # B H K
    total = torch.where(total > 0, total, 1)  # all logits -inf: the mean of nothing is 0
    rotated = weight if angles is None else lrpe(weight, angles)
    kv = torch.einsum("bthf,bthv->bhfv", rotated, v)
    total_f = total if angles is None else torch.cat([total, total], dim=-1)
    return AdditiveDecayState(peak.double() + total.double().log(), kv / total_f.unsqueeze(-1))
