"""The delta rule in plain torch: full, in chunks and token by token, in one direction or in both.

Each form runs from the first token to the last. A token decays the state, then applies R updates:

    S_{t,0} = diag(exp(a_t)) S_{t-1}
    S_{t,r} = (I - beta_tr k_tr k_tr^T) S_{t,r-1} + beta_tr k_tr v_tr^T      r = 1, ..., R
    o_t     = S_t^T q_t,   S_t = S_{t,R}

Inputs are in the accumulation dtype, and masked tokens are zero.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from onescan.checks import is_known
from onescan.ops.chunks import (
    chunk_scan,
    join_chunks,
    length_of_chunks,
    number_of_chunks,
    split_chunks,
)
from onescan.ops.decay_factors import decay_factors, decayed_scores, exp_decay, padded
from onescan.shapes import (
    KeyValue,
    LogDecays,
    Queries,
    UpdateBetas,
    UpdateKeys,
    UpdateValues,
    Values,
)


class Inputs(NamedTuple):
    """The tensors of one call.

    Attributes:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, R, H, K]`` of R updates per token.
        v: Values ``[B, T, R, H, V]``.
        beta: Write strengths ``[B, T, R, H]``.
        log_decay: Log-decays ``[1 or B, T, 1 or H, 1 or K]``; None for no decay.
        backward: Log-decays of the backward direction, which differ where one direction restarts.
    """

    q: Queries
    k: UpdateKeys
    v: UpdateValues
    beta: UpdateBetas
    log_decay: LogDecays | None = None
    backward: LogDecays | None = None


Form = Callable[..., tuple[Values, KeyValue]]
# Maps an initial state and the update of each chunk to the state before the first chunk.
Enter = Callable[[KeyValue, Tensor, Tensor], KeyValue]


def full(
    inputs: Inputs, kv: KeyValue, *, chunk_size: int, entering: Enter | None = None
) -> tuple[Values, KeyValue]:
    """Compute attention between all pairs of tokens, O(T^2), as a single chunk.

    Without an incoming state, O = lower(Q K^T) (I + A)^-1 diag(beta) V, with A as in `chunk`.
    """
    return chunk(inputs, kv, chunk_size=inputs.k.shape[1] * inputs.k.shape[2], entering=entering)


def chunk(
    inputs: Inputs, kv: KeyValue, *, chunk_size: int, entering: Enter | None = None
) -> tuple[Values, KeyValue]:
    """Compute the recurrence with matrix products inside chunks, in O(T).

    In a chunk with incoming state S, token t writes n_t = beta_t (v_t - S^T k_t - the value that
    tokens s < t of the chunk stored under its key), which is linear in S:

        (I + A) [W, U] = diag(beta) [K, V]      A = strictly lower part of diag(beta) K K^T
        N  = U - W S                            the values that the tokens write, one row each
        O  = Q S + lower(Q K^T) N
        S' = S + K^T N = (I - K^T W) S + K^T U

    Only the last line runs from chunk to chunk. Source: the WY representation of products of
    Householder matrices, applied to the delta rule in arXiv:2406.06484, Eq. 8 to 11.

    K, V and beta have a row for each update, R rows per token. With decay, each product of a row
    and an earlier row, of a row and S, and of a row or S and S' includes the decay between the two.
    """
    tokens, updates, _, width = inputs.k.shape[1:]
    size = length_of_chunks(max(1, chunk_size // updates), tokens)
    if is_known(tokens):
        size = -(-tokens // number_of_chunks(tokens, size))  # equal chunks, with little padding
    if inputs.log_decay is not None and inputs.log_decay.shape[-1] > 1:
        size = padded(size)
    split = partial(_split_updates, count=number_of_chunks(tokens, size), size=size)
    q, k, v = split(inputs.q.unsqueeze(2)), split(inputs.k), split(inputs.v)  # B H N R C .
    beta = split(inputs.beta.unsqueeze(-1))
    decay_matrix = torch.eye(width, dtype=k.dtype, device=k.device)
    writes, keys = (beta * k).unsqueeze(4), k.unsqueeze(3)  # B H N R 1 C K and B H N 1 R C K
    if inputs.log_decay is None:
        stored, scores = writes @ keys.mT, (q.unsqueeze(4) @ keys.mT).tril()
        q_in, k_in, k_out = q, k, k
    else:
        log_decay = split(inputs.log_decay.unsqueeze(2))  # B H N 1 C .
        product = _decayed_product(log_decay.unsqueeze(4), k.dtype)
        stored, scores = product(writes, keys), product(q.unsqueeze(4), keys)
        enter, leave, through = decay_factors(log_decay, k.dtype, backward=False)
        q_in, k_in, k_out = q * enter, k * enter, k * leave
        decay_matrix = decay_matrix * through.squeeze(3)
    q_in, k_out = _join_updates(q_in), _join_updates(k_out)  # B H N C K and B H N (C R) K

    # 1. The value that each update writes, as a function of the incoming state. The solver reads
    # only the strictly lower triangle of I + A.
    w, u = torch.linalg.solve_triangular(
        _join_pairs(stored),
        _join_updates(beta * torch.cat([k_in, v], dim=-1)),
        upper=False,
        unitriangular=True,
    ).split([width, v.shape[-1]], dim=-1)

    # 2. How each chunk updates a state, and the state before each chunk.
    transition = decay_matrix - k_out.mT @ w  # B H N K K
    added = k_out.mT @ u  # B H N K V
    if entering is not None:
        kv = entering(kv, transition, added)
    before, kv = chunk_scan(lambda kv, p, u: p @ kv + u, kv, transition, added)

    # 3. Each token reads the state before its chunk and the values written in its chunk so far.
    o = q_in @ before + _join_pairs(scores) @ (u - w @ before)
    return join_chunks(o, tokens), kv


def _split_updates(x: Tensor, *, count: int, size: int) -> Tensor:
    """Split [B, T, R, H, X] into chunks, [B, H, N, R, C, X], padded with zeros: neutral updates."""
    return split_chunks(x.transpose(2, 3), count, size).transpose(3, 4).contiguous()


def _decayed_product(log_decay: Tensor, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of rows and keys that computes their products with decay, [..., C, C].

    Products with later keys are zero.
    """
    if log_decay.shape[-1] > 1:
        return lambda rows, keys: decayed_scores(rows, keys, [log_decay])[0]
    size = log_decay.shape[-2]
    is_past = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    # each sum is computed directly, because gradients of differences of sums would lose precision
    sums = torch.where(is_past, log_decay, 0).cumsum(-2).masked_fill(is_past.mT, -torch.inf)
    decays = exp_decay(sums, dtype)
    return lambda rows, keys: rows @ keys.mT * decays


def _join_updates(x: Tensor) -> Tensor:
    return x.transpose(3, 4).flatten(3, 4)  # B H N (C R) .


def _join_pairs(x: Tensor) -> Tensor:
    return rearrange(x, "b h n r s i j -> b h n (i r) (j s)")


def recurrent(inputs: Inputs, kv: KeyValue, *, chunk_size: int) -> tuple[Values, KeyValue]:
    """Compute the recurrence token by token, in constant memory besides the outputs.

    (I - beta k k^T) S + beta k v^T = S + k (beta (v^T - k^T S)): an update writes the difference
    between its value and the value stored under its key.
    """
    q, k, v, beta, log_decay, _ = inputs
    outputs = []
    # unbind, because the gradient of a slice is as large as the sequence, for every token
    rows = (k.unsqueeze(-2), v.unsqueeze(-2), beta[..., None, None])  # B T R H 1 .
    updates = zip(*(x.flatten(1, 2).unbind(1) for x in rows), strict=True)
    decays = [None] * k.shape[1] if log_decay is None else log_decay.exp().unsqueeze(-1).unbind(1)
    for q_t, decay in zip(q.unsqueeze(-2).unbind(1), decays, strict=True):
        kv = kv if decay is None else decay * kv
        for k_r, v_r, beta_r in islice(updates, k.shape[2]):
            kv = torch.addcmul(kv, k_r.mT, beta_r * (v_r - k_r @ kv))
        outputs.append(q_t @ kv)
    return torch.cat(outputs, dim=-2).transpose(1, 2), kv


def causal(
    form: Form, inputs: Inputs, kv: KeyValue | None, **options: Any
) -> tuple[Values, KeyValue]:
    """Run a form from the first token to the last, from the state kv, or from zeros if None."""
    return form(inputs, _initial(kv, inputs), **options)


def bidirectional(
    form: Form,
    inputs: Inputs,
    forward_kv: KeyValue | None,
    backward_kv: KeyValue | None,
    **options: Any,
) -> tuple[Values, KeyValue, KeyValue]:
    """Add the outputs of both directions, counting each token's own updates once.

    Both directions apply the updates of a token in the same order, so that both states contain the
    same contribution of the token, and reversed tokens give reversed outputs.

    Source: LION, arXiv:2502.16249, App. B.7. Each direction subtracts half of the token's own
    output; the half printed in the paper, q k v / 2, lacks beta.

    Returns:
        The outputs, the state after the last token, and the backward state before the first.
    """
    # one call: the reversed sequences are concatenated along the batch axis
    *tokens, log_decay, backward = inputs
    both = Inputs(*(torch.cat([x, x.flip(1)]) for x in tokens))
    if log_decay is not None and backward is not None:
        shape = (*inputs.q.shape[:2], -1, -1)
        decays = log_decay.expand(shape), backward.expand(shape).flip(1)
        both = both._replace(log_decay=torch.cat(decays))
    kv = torch.cat([_initial(kv, inputs) for kv in (forward_kv, backward_kv)])
    o, kv = form(both, kv, **options)
    (forward, reversed_backward), (last, first) = (
        x.unflatten(0, (2, inputs.v.shape[0])) for x in (o, kv)
    )
    updates = list(zip(*(x.unbind(2) for x in inputs[1:4]), strict=True))
    self_output = _read_updates(inputs.q, updates)
    return forward + reversed_backward.flip(1) - self_output, last, first


def _read_updates(q: Queries, updates: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Values:
    """Return what queries read from the updates (k, v, beta) of their own token.

    A query reads beta (q . k) v of the last update. It reads the state before this update as the
    vector q - beta (q . k) k.
    """
    *earlier, (k, v, beta) = updates
    weight = (beta * (q * k).sum(-1)).unsqueeze(-1)
    o = weight * v
    return o + _read_updates(q - weight * k, earlier) if earlier else o


def _initial(kv: KeyValue | None, inputs: Inputs) -> KeyValue:
    q, v = inputs.q, inputs.v
    return v.new_zeros(*q[:, 0].shape, v.shape[-1]) if kv is None else kv.to(v.dtype)
