"""Causal additive decay in chunks, for any logits: each token under its own normalizer exp(z_t).

    o_t = R(q_t)^T sum_{s <= t} R(exp(k_s - z_t)) v_s^T

A token reads its chunk's own sum and what the state before it holds, each under its share of the
normalizer. Logarithms are float64 and only their differences become float32: next to
a logit of 1e4 float32 has steps of 1e-3, and over 100,000 tokens its running sum drifts.

Source: LightNet, arXiv:2405.21022, Eq. 13.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from onescan.ops.additive_decay.state import AdditiveDecayState, per_feature, share
from onescan.ops.additive_decay.triangle import LEAF, causal_sum, rotated
from onescan.ops.chunks import length_of_chunks, linear_scan, number_of_chunks
from onescan.ops.numerics import LOG_ZERO, logaddexp, running_logsumexp
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
    tokens = k.shape[1]
    size = length_of_chunks(chunk_size, tokens)
    count = number_of_chunks(tokens, size)
    q, v = _chunks(q, count, size), _chunks(v, count, size)  # B H N C .
    k = _chunks(k.double(), count, size, fill=-torch.inf)
    turn = None  # cos and sin, H N C K
    if angles is not None:
        angles = _chunks(angles.unsqueeze(0), count, size).squeeze(0)
        turn = (angles.cos().to(q.dtype), angles.sin().to(q.dtype))

    # 1. log-normalizers: inside each chunk, after and before each chunk, and up to each token
    z_inside = running_logsumexp(k.clamp(min=LOG_ZERO))
    z_chunk = z_inside[..., -1, :]  # B H N K
    z_enter = z_chunk.new_full(z_chunk[:, :, 0].shape, LOG_ZERO)
    if state is not None:
        z_enter = state.log_normalizer
    z_after = running_logsumexp(torch.cat([z_enter.unsqueeze(2), z_chunk], dim=2))
    z_before, z_after = z_after[:, :, :-1], z_after[:, :, 1:]
    z = logaddexp(z_before.unsqueeze(-2), z_inside)

    # 2. what each chunk alone would leave behind, and the state before each chunk
    kv_chunk = rotated(share(k, z_chunk.unsqueeze(-2), q), turn).mT @ v  # B H N F V
    kv_chunk = kv_chunk * per_feature(share(z_chunk, z_after, q), kv_chunk)
    decay = per_feature(share(z_before, z_after, q), kv_chunk)  # B H N F 1
    kv = torch.zeros_like(kv_chunk[:, :, 0]) if state is None else state.kv
    kv_before, kv = linear_scan(kv, kv_chunk, decay)

    # 3. each token reads the state before its chunk and the tokens of its chunk
    before = rotated(q * share(z_before.unsqueeze(-2), z, q), turn)
    o = before @ kv_before + causal_sum(q, k, z, v, turn)
    o = rearrange(o[..., :size, :], "b h n c v -> b (n c) h v").narrow(1, 0, tokens)
    return o, AdditiveDecayState(z_after[:, :, -1], kv)


def _chunks(x: Tensor, count: int, size: int, *, fill: float = 0.0) -> Tensor:
    """Cut [B, T, H, X] into chunks of `size` tokens, each padded to a power of two."""
    x = F.pad(x, (0, 0, 0, 0, 0, count * size - x.shape[1]), value=fill)
    x = rearrange(x, "b (n c) h x -> b h n c x", n=count, c=size)
    padded = max(LEAF, 1 << (size - 1).bit_length())
    return F.pad(x, (0, 0, 0, padded - size), value=fill).contiguous()
