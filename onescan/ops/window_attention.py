"""Sliding-window attention: softmax over the tokens at most `window` positions away, in O(T w)."""

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from onescan.checks import is_known
from onescan.ops.chunks import number_of_chunks
from onescan.shapes import CachedKeep, CachedKeys, CachedSequence, HeadsFirst

MIN_BLOCK = 64  # tokens; smaller blocks are slower on a CPU


def window_attention(
    q: HeadsFirst,
    k: CachedKeys,
    v: CachedKeys,
    *,
    window: int,
    causal: bool,
    keep: CachedKeep | None = None,
    sequence: CachedSequence | None = None,
    dropout: float = 0.0,
) -> HeadsFirst:
    """Compute o_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s over |t - s| <= window.

    Queries are split into blocks of at least `window` tokens. Each block reads itself and its
    neighbors, so neither time nor memory grows with the square of the length.

    Args:
        q: Queries, [B, H, T, K].
        k: Keys of S >= T tokens, [B, H, S, K], of which the last T are those of the queries.
        v: Values of the same tokens.
        window: Largest distance between a query and the tokens that it reads.
        causal: Whether queries read only their own and earlier tokens.
        keep: True for real tokens, [B, S]. Other tokens count as positions but are read only by
            themselves, so that no softmax is empty. They may be NaN.
        sequence: Index of the packed sequence of each key, [B, S]. Sequences do not read each
            other. None for a single sequence.
        dropout: Dropout probability of the attention weights.
    """
    labels = torch.zeros(1, k.shape[2], dtype=torch.int64, device=q.device)
    if sequence is not None:
        labels = sequence
    attend = partial(_attend, window=window, causal=causal, dropout=dropout)
    if keep is None:
        return attend(q, k, v, labels)
    real = keep[:, None, :, None]
    query_values, is_real = (x[:, :, k.shape[2] - q.shape[2] :] for x in (v, real))
    q = q.masked_fill(~is_real, 0)  # 0 times NaN is NaN
    k, v = (x.masked_fill(~real, 0) for x in (k, v))
    return attend(q, k, v, labels.masked_fill(~keep, -1)).where(is_real, query_values)


def _attend(
    q: HeadsFirst,
    k: CachedKeys,
    v: CachedKeys,
    labels: Int[Tensor, "rows S"],
    *,
    window: int,
    causal: bool,
    dropout: float,
) -> HeadsFirst:
    """Attend to tokens of the same label; those of label -1 read only themselves."""
    tokens, cached = q.shape[2], k.shape[2] - q.shape[2]
    block = max(window, MIN_BLOCK)
    if is_known(tokens) and tokens <= block:
        mask = _mask(labels[:, cached:], labels, cached, window, causal=causal)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.unsqueeze(1), dropout_p=dropout
        )
    count = number_of_chunks(tokens, block)
    before, after = 1, 0 if causal else 1  # neighbors of a block
    padding = count * block - tokens
    pad = (before * block - cached, padding + after * block)

    def windows(x: Tensor) -> Tensor:  # [B, N, H, (before + 1 + after) * C, ...]
        blocks = x.unflatten(2, (before + count + after, block))
        parts = [blocks[:, :, i : i + count] for i in range(before + 1 + after)]
        return torch.cat(parts, dim=3).transpose(1, 2)

    k, v = (windows(F.pad(x, (0, 0, *pad))).flatten(0, 1) for x in (k, v))
    key_labels = windows(F.pad(labels, pad, value=-1).unsqueeze(1)).squeeze(2)
    query_labels = F.pad(labels[:, cached:], (0, padding), value=-1).unflatten(1, (count, block))
    mask = _mask(query_labels, key_labels, before * block, window, causal=causal)
    mask = mask.expand(q.shape[0], -1, -1, -1).flatten(0, 1).unsqueeze(1)
    blocks = F.pad(q, (0, 0, 0, padding)).unflatten(2, (count, block)).transpose(1, 2)
    o = F.scaled_dot_product_attention(
        blocks.flatten(0, 1), k, v, attn_mask=mask, dropout_p=dropout
    )
    return o.unflatten(0, blocks.shape[:2]).transpose(1, 2).flatten(2, 3)[:, :, :tokens]


def _mask(
    query_labels: Int[Tensor, "*rows queries"],
    key_labels: Int[Tensor, "*rows keys"],
    start: int,
    window: int,
    *,
    causal: bool,
) -> Tensor:
    """Return which keys each query reads, [*rows, queries, keys], given the labels of tokens.

    The first query has the position of key `start`. Tokens read tokens of the same label; those of
    label -1 read only themselves.
    """
    t = torch.arange(query_labels.shape[-1], device=query_labels.device).unsqueeze(-1) + start
    distance = t - torch.arange(key_labels.shape[-1], device=query_labels.device)
    is_near = (distance <= window) & (distance >= (0 if causal else -window))
    is_same = (query_labels.unsqueeze(-1) == key_labels.unsqueeze(-2)) & (
        query_labels >= 0
    ).unsqueeze(-1)
    return (is_near & is_same) | (distance == 0)
