"""The delta rule as defined, token by token: the reference for the tests.

Source: LION, arXiv:2502.16249, Table 1 and App. B.7. In App. B.7, the half of a token's own output
that each direction subtracts is printed without beta; it is included here:

    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    o_t = S_t^T q_t                                      causal
    o_t = S_t^T q_t - beta_t (q_t . k_t) v_t / 2         bidirectional: the sum of both directions
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from onescan.checks import unpack_states
from onescan.ops.delta_rule import DeltaState, DeltaStates, Sides
from onescan.shapes import Betas, Keep, Keys, Queries, Values


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    beta: Betas,
    *,
    causal: bool = False,
    keep: Keep | None = None,
    state: DeltaState | Sides | None = None,
) -> tuple[Values, DeltaState | DeltaStates]:
    seen = torch.ones_like(beta) if keep is None else keep.unsqueeze(-1).to(beta.dtype)
    beta = beta * seen
    tokens = range(k.shape[1])
    left, right = unpack_states(state, DeltaState, causal=causal)
    o, last = _visit(tokens, q, k, v, beta, left)
    if causal:
        return o * seen.unsqueeze(-1), last
    from_right, first = _visit(reversed(tokens), q, k, v, beta, right)
    own = beta.unsqueeze(-1) * (q * k).sum(-1, keepdim=True) * v
    o = (o - own / 2) + (from_right - own / 2)
    return o * seen.unsqueeze(-1), DeltaStates(last, first)


def _visit(
    order: Iterable[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: DeltaState | None,
) -> tuple[Tensor, DeltaState]:
    identity = torch.eye(k.shape[-1], dtype=k.dtype)
    kv = k.new_zeros(*k[:, 0].shape, v.shape[-1]) if state is None else state.kv.to(v.dtype)
    outputs = {}
    for t in order:
        written = beta[:, t, :, None] * k[:, t]  # B H K
        kv = (identity - written.unsqueeze(-1) * k[:, t].unsqueeze(-2)) @ kv
        kv = kv + written.unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs[t] = (kv * q[:, t].unsqueeze(-1)).sum(-2)
    return torch.stack([outputs[t] for t in sorted(outputs)], dim=1), DeltaState(kv)
