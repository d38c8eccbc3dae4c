"""The delta rule as defined, update by update: the reference for the tests.

Sources: LION, arXiv:2502.16249, Table 1 and App. B.7; Gated DeltaNet, arXiv:2412.06464; KDA,
arXiv:2510.26692 (a decay per key channel); DeltaProduct, arXiv:2502.10297 (R updates per token):

    S_{t,0} = diag(exp(a_t)) S_{t-1}                                               a = log_decay
    S_{t,r} = (I - beta_tr k_tr k_tr^T) S_{t,r-1} + beta_tr k_tr v_tr^T            r = 1, ..., R
    S_t = S_{t,R},   o_t = S_t^T q_t                                               causal

In bidirectional calls, each direction visits the tokens from its own end, but applies the updates
of a token in the same order. Both states contain B_t, which the updates of token t write to an
empty state. Each direction subtracts half of it, o_t = (S_t - B_t / 2)^T q_t, and the outputs are
added. For a single update, B_t = beta_t k_t v_t^T; LION's App. B.7 prints this half without beta.
With `causal_block`, the backward direction starts from an empty state at the end of each block.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from onescan.checks import unpack_states
from onescan.ops.blocks import Blocks, block_ranges
from onescan.ops.delta_rule import DeltaState, DeltaStates, StatePair
from onescan.shapes import Keep, Queries, UpdateBetas, UpdateKeys, UpdateValues, Values


def forward(
    q: Queries,
    k: UpdateKeys,
    v: UpdateValues,
    beta: UpdateBetas,
    log_decay: Tensor | None = None,
    *,
    causal: bool = False,
    causal_block: Blocks | None = None,
    keep: Keep | None = None,
    state: DeltaState | StatePair | None = None,
) -> tuple[Values, DeltaState | DeltaStates]:
    if k.ndim == q.ndim:
        k, v, beta = k.unsqueeze(2), v.unsqueeze(2), beta.unsqueeze(2)
    decay = torch.ones_like(q)
    if log_decay is not None:
        wide = log_decay if log_decay.ndim == q.ndim else log_decay.unsqueeze(-1)
        decay = wide.exp().expand_as(q)
    seen = q.new_ones(q.shape[:2], dtype=torch.bool) if keep is None else keep
    beta = beta * seen[:, :, None, None]
    decay = torch.where(seen[:, :, None, None], decay, 1)
    tokens = range(q.shape[1])
    has_one_state = causal or causal_block is not None
    left, right = unpack_states(state, DeltaState, causal=has_one_state)
    o, last = _visit(tokens, q, k, v, beta, decay, left)
    first = None
    if not causal:
        blocks = block_ranges(causal_block, len(tokens))
        parts = [_visit(block[::-1], q, k, v, beta, decay, right) for block in blocks]
        from_right, first = torch.cat([part for part, _ in parts], dim=1), parts[0][1]
        empty = q.new_zeros(last.kv.shape)
        self_outputs = [
            _read(_updated(empty, k[:, t], v[:, t], beta[:, t]), q[:, t]) for t in tokens
        ]
        half = torch.stack(self_outputs, dim=1) / 2
        o = (o - half) + (from_right - half)
    return o * seen[:, :, None, None], last if has_one_state else DeltaStates(last, first)


def _visit(
    order: Iterable[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    state: DeltaState | None,
) -> tuple[Tensor, DeltaState]:
    kv = q.new_zeros(*q[:, 0].shape, v.shape[-1]) if state is None else state.kv.to(v.dtype)
    outputs = {}
    for t in order:
        kv = _updated(decay[:, t].unsqueeze(-1) * kv, k[:, t], v[:, t], beta[:, t])
        outputs[t] = _read(kv, q[:, t])
    return torch.stack([outputs[t] for t in sorted(outputs)], dim=1), DeltaState(kv)


def _updated(kv: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Apply the updates of one token, [B, R, H, ...], to a state."""
    identity = torch.eye(k.shape[-1], dtype=k.dtype)
    for r in range(k.shape[1]):
        written = beta[:, r].unsqueeze(-1) * k[:, r]  # B H K
        kv = (identity - written.unsqueeze(-1) * k[:, r].unsqueeze(-2)) @ kv
        kv = kv + written.unsqueeze(-1) * v[:, r].unsqueeze(-2)
    return kv


def _read(kv: Tensor, q: Tensor) -> Tensor:
    return (kv * q.unsqueeze(-1)).sum(-2)
