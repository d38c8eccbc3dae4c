"""Reference implementation of additive decay: the equations of the paper, token by token.

Source: LightNet, arXiv:2405.21022, Eq. 13 and Eq. 14, with LRPE inside as in App. A.2:

    s_t  = s_{t-1} + exp(k_t)                      stored as z_t = log s_t
    f_t  = s_{t-1} / s_t                           the decay, equal to 1 - exp(k_t) / s_t
    KV_t = diag(f_t) KV_{t-1} + R_t(exp(k_t) / s_t) v_t^T
    o_t  = KV_t^T R_t(q_t)                         causal
    o_t  = KV_T^T R_t(q_t)                         not causal: all tokens read the last state

where R_t(x) = [x cos(a_t), x sin(a_t)] and f_t multiplies both halves.

With `causal_block`, o_t reads the state after the last token of its block. With `leak`, each token
first multiplies s_{t-1} by exp(-leak): s_t = exp(-leak) s_{t-1} + exp(k_t), and f_t likewise.
"""

import torch
from torch import Tensor

from onescan.ops.additive_decay.state import AdditiveDecayState
from onescan.ops.blocks import Blocks, block_ranges
from onescan.ops.numerics import LOG_ZERO
from onescan.shapes import Angles, Keep, Keys, Leak, Queries, Values


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    angles: Angles | None = None,
    causal: bool = False,
    causal_block: Blocks | None = None,
    keep: Keep | None = None,
    state: AdditiveDecayState | None = None,
    leak: Leak | None = None,
) -> tuple[Values, AdditiveDecayState]:
    batch, tokens, heads, width = k.shape
    features = width if angles is None else 2 * width
    if state is None:
        z = torch.full((batch, heads, width), -torch.inf, dtype=k.dtype)
        kv = torch.zeros(batch, heads, features, v.shape[-1], dtype=v.dtype)
    else:
        z, kv = state.log_normalizer.to(k.dtype), state.kv.to(v.dtype)
    rate = 0.0 if leak is None else leak if leak.ndim > 1 else leak.unsqueeze(-1)  # H K or H 1
    states = []
    for t in range(tokens):
        seen = torch.ones(batch, dtype=torch.bool) if keep is None else keep[:, t]
        angle = None if angles is None else angles[t]
        z, kv = _step(z, kv, k[:, t], v[:, t], angle, seen, rate)
        states.append(kv)
    outputs = []
    for block in block_ranges(1 if causal else causal_block, tokens):
        for t in block:
            rotated = _rotate(q[:, t], None if angles is None else angles[t])
            o = (states[block[-1]].mT @ rotated.unsqueeze(-1)).squeeze(-1)
            outputs.append(o if keep is None else o * keep[:, t, None, None])
    return torch.stack(outputs, dim=1), AdditiveDecayState(z, kv)


def _step(
    z: Tensor,
    kv: Tensor,
    k: Tensor,
    v: Tensor,
    angle: Tensor | None,
    seen: Tensor,
    rate: Tensor | float,
) -> tuple[Tensor, Tensor]:
    leaked = z - rate
    new_z = torch.logaddexp(leaked, k)
    base = new_z.clamp(
        min=max(LOG_ZERO, torch.finfo(new_z.dtype).min)
    )  # of -inf alone, exp(-inf - -inf) would be NaN, not 0
    decay = torch.cat([(leaked - base).exp()] * (1 if angle is None else 2), dim=-1)
    new_kv = decay.unsqueeze(-1) * kv
    new_kv = new_kv + _rotate((k - base).exp(), angle).unsqueeze(-1) * v.unsqueeze(-2)
    return (
        torch.where(seen[:, None, None], new_z, z),
        torch.where(seen[:, None, None, None], new_kv, kv),
    )


def _rotate(x: Tensor, angle: Tensor | None) -> Tensor:
    return x if angle is None else torch.cat([x * angle.cos(), x * angle.sin()], dim=-1)
