"""The delta rule in plain torch: in chunks and token by token, in one direction or in both.

Each form runs from the first token to the last,

    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t.

Inputs are in the accumulation dtype, and masked tokens are zero. `starts` marks the first tokens of
packed sequences, [B, T], before which the state is zero; None if each row is one sequence.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from onescan.ops.chunks import chunk_scan, length_of_chunks, number_of_chunks
from onescan.shapes import Betas, Keys, KeyValue, Queries, Starts, Values


class Inputs(NamedTuple):
    """The tensors of one call.

    Attributes:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, H, V]``.
        beta: Write strengths ``[B, T, H]``.
    """

    q: Queries
    k: Keys
    v: Values
    beta: Betas


Form = Callable[..., tuple[Values, KeyValue]]


def chunk(
    inputs: Inputs, kv: KeyValue, *, chunk_size: int, starts: Starts | None = None
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

    If sequences are packed, pairs of tokens of different sequences have no scores, and S is zero
    for tokens after the first `starts` of the chunk, as are contributions to S' before the last.
    """
    tokens, width = inputs.k.shape[1], inputs.k.shape[-1]
    size = length_of_chunks(chunk_size, tokens)
    count = number_of_chunks(tokens, size)
    q, k, v = (_split_chunks(x, count, size) for x in inputs[:3])  # B H N C .
    beta = _split_chunks(inputs.beta.unsqueeze(-1), count, size)
    one = torch.eye(width, dtype=k.dtype, device=k.device)
    stored, scores = beta * k @ k.mT, q @ k.mT
    q_in, k_in, k_out = q, k, k  # that read the incoming state, and write to the outgoing one
    if starts is not None:
        number = _split_chunks(starts[:, :, None, None].to(k.dtype), count, size).cumsum(-2)
        is_same, last = number == number.mT, number[..., -1:, :]
        stored, scores = stored * is_same, scores * is_same
        q_in, k_in, k_out = q * (number == 0), k * (number == 0), k * (number == last)
        one = one * (last == 0)

    # 1. The value that each token writes, as a function of the incoming state. The solver reads
    # only the strictly lower triangle of I + A.
    w, u = torch.linalg.solve_triangular(
        stored, beta * torch.cat([k_in, v], dim=-1), upper=False, unitriangular=True
    ).split([width, v.shape[-1]], dim=-1)

    # 2. How each chunk updates a state, and the state before each chunk.
    transition = one - k_out.mT @ w  # B H N K K
    added = k_out.mT @ u  # B H N K V
    before, kv = chunk_scan(lambda kv, kept, new: kept @ kv + new, kv, transition, added)

    # 3. Each token reads the state before its chunk and the values written in its chunk so far.
    o = q_in @ before + scores.tril() @ (u - w @ before)
    return rearrange(o, "b h n c v -> b (n c) h v").narrow(1, 0, tokens), kv


def _split_chunks(x: Tensor, count: int, size: int) -> Tensor:
    """Split [B, T, H, X] into chunks of `size` tokens, padded with zeros, which write nothing."""
    x = F.pad(x, (0, 0, 0, 0, 0, count * size - x.shape[1]))
    return rearrange(x, "b (n c) h x -> b h n c x", n=count, c=size).contiguous()


def recurrent(
    inputs: Inputs, kv: KeyValue, *, chunk_size: int, starts: Starts | None = None
) -> tuple[Values, KeyValue]:
    """Compute the recurrence token by token, in constant memory besides the outputs.

    (I - beta k k^T) S + beta k v^T = S + k (beta (v^T - k^T S)): a token writes the difference
    between its value and the value stored under its key.
    """
    q, k, v, beta = inputs
    outputs = []
    begins = [None] * k.shape[1] if starts is None else starts[..., None, None, None].unbind(1)
    # unbind, because the gradient of a slice is as large as the sequence, for every token
    rows = (q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-2), beta[..., None, None])  # B T H 1 .
    for q_t, k_t, v_t, beta_t, start in zip(*(x.unbind(1) for x in rows), begins, strict=True):
        kv = kv if start is None else kv.masked_fill(start, 0)
        kv = torch.addcmul(kv, k_t.mT, beta_t * (v_t - k_t @ kv))
        outputs.append(q_t @ kv)
    return torch.cat(outputs, dim=-2).transpose(1, 2), kv


FORMS: dict[str, Form] = {"chunk": chunk, "recurrent": recurrent}


def causal(
    form: Form, inputs: Inputs, kv: KeyValue | None, *, chunk_size: int, starts: Starts | None
) -> tuple[Values, KeyValue]:
    """Run a form from the first token to the last, from the state kv, or from zeros if None."""
    return form(inputs, _initial(kv, inputs), chunk_size=chunk_size, starts=starts)


def bidirectional(
    form: Form,
    inputs: Inputs,
    forward_kv: KeyValue | None,
    backward_kv: KeyValue | None,
    *,
    chunk_size: int,
    starts: Starts | None,
) -> tuple[Values, KeyValue, KeyValue]:
    """Add the outputs of both directions, and count each token's own write once.

    Source: LION, arXiv:2502.16249, App. B.7. Each direction subtracts half of the token's own
    output; the half printed in the paper, q k v / 2, lacks beta.

    Returns:
        The outputs, the state after the last token, and the backward state before the first.
    """
    # one call: the reversed sequences are concatenated along the batch axis
    both = Inputs(*(torch.cat([x, x.flip(1)]) for x in inputs))
    kv = torch.cat([_initial(kv, inputs) for kv in (forward_kv, backward_kv)])
    if starts is not None:
        ends = F.pad(starts[:, 1:], (0, 1), value=True)
        starts = torch.cat([starts, ends.flip(1)])
    o, kv = form(both, kv, chunk_size=chunk_size, starts=starts)
    (forward, reversed_backward), (last, first) = (
        x.unflatten(0, (2, inputs.v.shape[0])) for x in (o, kv)
    )
    own = (inputs.beta * (inputs.q * inputs.k).sum(-1)).unsqueeze(-1) * inputs.v
    return forward + reversed_backward.flip(1) - own, last, first


def _initial(kv: KeyValue | None, inputs: Inputs) -> KeyValue:
    k, v = inputs.k, inputs.v
    return v.new_zeros(*k[:, 0].shape, v.shape[-1]) if kv is None else kv.to(v.dtype)
