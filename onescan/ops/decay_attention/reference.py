"""Reference implementation of decay attention: the equations of the paper, token by token.

Source: LION, arXiv:2502.16249, Eq. 4 to 6 and 79, Theorem B.1, with the indices of Eq. 14 for
"source" and of Eq. 5 for "target"; Table 1 prints the mask of "symmetric", which is "target"
forward and "source" backward. Each direction visits all tokens, starting from its own end:

    target:  S = diag(exp(a_t)) S + k_t v_t^T          o = S^T q_t
    source:  S = S + k_t v_t^T                         o = S^T q_t,   then S = diag(exp(a_t)) S

z is S with v replaced by 1. If not causal, the outputs of both directions are added. Both contain
the token's own contribution k_t v_t^T q_t, so half of it is subtracted from each. With
`causal_block`, the backward direction starts from an empty state at the end of each block.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from onescan.checks import unpack_states
from onescan.ops.blocks import Blocks, block_ranges
from onescan.ops.decay_attention import DecayState, DecayStates
from onescan.ops.numerics import MIN_DIVISOR
from onescan.shapes import Keep, Keys, Queries, Values


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: Tensor | None = None,
    *,
    causal: bool = False,
    causal_block: Blocks | None = None,
    decay_at: str,
    normalize: str = "none",
    keep: Keep | None = None,
    state: DecayState | DecayStates | None = None,
) -> tuple[Values, DecayState | DecayStates]:
    batch, tokens = k.shape[:2]
    decay = torch.ones_like(k)
    if log_decay is not None:
        wide = log_decay if log_decay.ndim == k.ndim else log_decay.unsqueeze(-1)
        decay = wide.exp().expand_as(k)
    is_real = torch.ones(batch, tokens, dtype=torch.bool) if keep is None else keep
    left, right = unpack_states(state, DecayState, causal=causal or causal_block is not None)
    first, second = ("target", "source") if decay_at == "symmetric" else (decay_at, decay_at)
    o, c, left = _visit(range(tokens), q, k, v, decay, is_real, left, first, counts_self=causal)
    if not causal:
        parts = [
            _visit(reversed(block), q, k, v, decay, is_real, right, second, counts_self=False)
            for block in block_ranges(causal_block, tokens)
        ]
        outputs, sums, states = zip(*parts, strict=True)
        o, c, right = o + torch.cat(outputs, dim=1), c + torch.cat(sums, dim=1), states[0]
    if normalize == "sum":
        o = o / torch.where(c.abs() < MIN_DIVISOR, 1, c).unsqueeze(-1)
    elif normalize == "max_one":
        o = o / (c.abs() if causal else c).clamp(min=1).unsqueeze(-1)
    has_one_state = causal or causal_block is not None
    return o * is_real[:, :, None, None], left if has_one_state else DecayStates(left, right)


def _visit(
    order: Iterable[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    is_real: Tensor,
    state: DecayState | None,
    decay_at: str,
    *,
    counts_self: bool,
) -> tuple[Tensor, Tensor, DecayState]:
    if state is None:
        state = DecayState(k.new_zeros(*k[:, 0].shape, v.shape[-1]), torch.zeros_like(k[:, 0]))
    kv, z = state
    outputs, sums = {}, {}
    for t in order:
        is_token = is_real[:, t, None, None]
        factor = torch.where(is_token, decay[:, t], 1)
        token_z = torch.where(is_token, k[:, t], 0)
        token_kv = token_z.unsqueeze(-1) * v[:, t].unsqueeze(-2)
        if decay_at == "target":
            kv, z = factor.unsqueeze(-1) * kv, factor * z
        kv, z = kv + token_kv, z + token_z
        half = 0 if counts_self else 0.5
        outputs[t] = ((kv - half * token_kv) * q[:, t].unsqueeze(-1)).sum(-2)
        sums[t] = ((z - half * token_z) * q[:, t]).sum(-1)
        if decay_at == "source":
            kv, z = factor.unsqueeze(-1) * kv, factor * z
    tokens = sorted(outputs)
    o = torch.stack([outputs[t] for t in tokens], dim=1)
    return o, torch.stack([sums[t] for t in tokens], dim=1), DecayState(kv, z)
