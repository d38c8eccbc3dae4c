"""Causal additive decay one token at a time: constant memory, for decoding."""

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
    rotated_q = q if angles is None else lrpe(q, angles)
    log_k = k.double().clamp(min=LOG_ZERO)
    # a token's own mean of values is its value, under the normalizer exp(k): LRPE turns a key of 1
    unit = (k > -torch.inf).to(k.dtype)
    unit = unit if angles is None else lrpe(unit, angles)
    outputs = []
    parts = (rotated_q.unsqueeze(-2), log_k, unit.unsqueeze(-1), v.unsqueeze(-2))
    for query, log_key, key, value in zip(*(x.unbind(1) for x in parts), strict=True):
        token = AdditiveDecayState(log_key, key * value)
        state = token if state is None else merged(state, token)
        outputs.append((query @ state.kv).squeeze(-2))
    assert state is not None
    return torch.stack(outputs, dim=1), state
