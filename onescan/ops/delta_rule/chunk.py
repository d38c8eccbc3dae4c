"""The delta rule in chunks, O(T): a triangular system inside each, one state from one to the next.

Within a chunk that the state S enters, token t writes n_t = beta_t (v_t - S^T k_t - what tokens
s < t of the chunk hold under its key), which is linear in S:

    (I + A) [W, U] = diag(beta) [K, V]      A = strictly lower part of diag(beta) K K^T
    N  = U - W S                            what the tokens write, one row each
    O  = Q S + lower(Q K^T) N
    S' = S + K^T N = (I - K^T W) S + K^T U

Only the last line runs from chunk to chunk. Source: the WY representation of products of
Householder matrices; its use for the delta rule, arXiv:2406.06484, Eq. 8 to 11.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from onescan.ops.chunks import chunk_scan, length_of_chunks, number_of_chunks
from onescan.shapes import Betas, Keys, KeyValue, Queries, Values


def forward(
    q: Queries, k: Keys, v: Values, beta: Betas, kv: KeyValue, *, chunk_size: int
) -> tuple[Values, KeyValue]:
    tokens, width = k.shape[1], k.shape[-1]
    size = length_of_chunks(chunk_size, tokens)
    count = number_of_chunks(tokens, size)
    q, k, v, beta = (_chunks(x, count, size) for x in (q, k, v, beta.unsqueeze(-1)))  # B H N C .

    # 1. what each token writes, as a map of the state that enters; of I + A the solver reads only
    # what is below the diagonal
    w, u = torch.linalg.solve_triangular(
        beta * k @ k.mT, beta * torch.cat([k, v], dim=-1), upper=False, unitriangular=True
    ).split([width, v.shape[-1]], dim=-1)

    # 2. what each chunk makes of a state, and the state before each chunk
    through = torch.eye(width, dtype=k.dtype, device=k.device) - k.mT @ w  # B H N K K
    added = k.mT @ u  # B H N K V
    entering, kv = chunk_scan(lambda kv, kept, new: kept @ kv + new, kv, through, added)

    # 3. each token reads the state before its chunk and what its chunk has written so far
    o = q @ entering + (q @ k.mT).tril() @ (u - w @ entering)
    return rearrange(o, "b h n c v -> b (n c) h v").narrow(1, 0, tokens), kv


def _chunks(x: Tensor, count: int, size: int) -> Tensor:
    """Cut [B, T, H, X] into chunks of `size` tokens; those past the end write nothing."""
    x = F.pad(x, (0, 0, 0, 0, 0, count * size - x.shape[1]))
    return rearrange(x, "b (n c) h x -> b h n c x", n=count, c=size).contiguous()
