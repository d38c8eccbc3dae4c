"""Decayed attention in chunks, O(T) in both directions: attention inside, states in between.

Each direction carries one state from chunk to chunk; inside a chunk the scores are computed once
for both. On a CPU the C x C scores of some chunks exist at a time, elsewhere those of all, T C
numbers a head.

Source: LION, arXiv:2502.16249, Sec. 3.4. States carried both ways are not in the paper, whose
chunks (Eq. 81) meet every other chunk.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from onescan.checks import can_look_at_values
from onescan.ops.chunks import is_known, length_of_chunks, number_of_chunks
from onescan.ops.decay_attention.diagonal import GIVEN, padded, scores_of
from onescan.ops.decay_attention.directions import Directions, Divide, Matrices, Results
from onescan.ops.decay_attention.passing import BACKWARD, attended
from onescan.ops.decay_attention.pieces import cut, joined, places
from onescan.ops.decay_attention.reach import reach, totals
from onescan.ops.decay_attention.scalar import MASKED
from onescan.shapes import Keys, Queries, Values

CACHED = 1 << 20  # scores or values that a CPU's caches hold
KEPT = 1 << 22  # and those of memory that is used again: what is much larger is new in every call
HEADS = (2, 2, 2, 2, 2, 1, 1)  # the axis of q, k, v, both decays, and both states that enter


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    decays: Directions,
    enters: Matrices,
    *,
    chunk_size: int,
    return_state: bool,
    divide: Divide | None,
) -> Results:
    size = length_of_chunks(chunk_size, k.shape[1])
    attend = partial(_forward, size=size, return_state=return_state, divide=divide)
    if not can_look_at_values(q):  # lengths may be symbols then
        return attend(q, k, v, decays, enters)
    where = places(len(q), q.shape[2], *_at_once(q, v, size))
    if len(where) == 1:
        return attend(q, k, v, decays, enters)
    cuts = (cut(x, axis, where) for x, axis in zip((q, k, v, *decays, *enters), HEADS, strict=True))
    leaves = []

    def outputs() -> Iterator[Values]:
        for q, k, v, forward, backward, left, right in zip(*cuts, strict=True):
            o, leave = attend(q, k, v, Directions(forward, backward), Matrices(left, right))
            leaves.append(leave)
            yield o

    o = joined(outputs(), v.shape, 2, where)  # now all leaves are there
    of_state = (len(k), *k.shape[2:], v.shape[-1] + 1)
    sides = (
        None if side[0] is None else joined(side, of_state, 1, where)
        for side in zip(*leaves, strict=True)
    )
    return Results(o, Matrices(*sides))


def _at_once(q: Queries, v: Values, size: int) -> tuple[int, int]:
    """How many samples, and how many heads of one where it is large."""
    batch, tokens, heads, _ = q.shape
    of_head = tokens * max(size, v.shape[-1])
    # gradients keep states and, of diagonal decays, scores: no cache holds them
    most = KEPT if torch.is_grad_enabled() else CACHED
    samples = min(batch, max(1, most // (of_head * heads)))
    return samples, heads if samples > 1 else min(heads, max(1, KEPT // of_head))


def _forward(
    q: Queries,
    k: Keys,
    v: Values,
    decays: Directions,
    enters: Matrices,
    *,
    size: int,
    return_state: bool,
    divide: Divide | None,
) -> Results:
    tokens = k.shape[1]
    count = number_of_chunks(tokens, size)
    filled = padded(size) if decays.is_diagonal else size
    heads = k.shape[0], -1, k.shape[2], -1  # len would fix the batch of an export
    log_decays = [x.expand(heads) for x in decays if x is not None]
    q, k, v, *log_decays = (_chunks(x, count, size, filled) for x in (q, k, v, *log_decays))
    q, k = q.contiguous(), k.contiguous()  # B H N C K

    # 1. within a chunk every query meets every key, in both directions at once
    if decays.is_diagonal:
        scores, reaches = scores_of(q, k, *log_decays)
        how, others = GIVEN, [scores]
    else:
        ways = BACKWARD[: len(log_decays)]
        others = [totals(x, backward=way) for x, way in zip(log_decays, ways, strict=True)]
        reaches = [reach(x, q.dtype, backward=way) for x, way in zip(others, ways, strict=True)]
        how = MASKED

    # 2. from chunk to chunk each direction passes its state
    o, row_sum, leaves = attended(
        how,
        q,
        k,
        v,
        others,
        reaches,
        enters,
        with_sum=divide is not None,
        return_state=return_state,
    )

    if divide is not None and row_sum is not None:
        o = divide(o, row_sum)  # in memory as chunks are
    o = rearrange(_first(size, o, -2), "b h n c v -> b (n c) h v")
    return Results(_first(tokens, o, 1), leaves)


def _first(count: int, x: Tensor, axis: int) -> Tensor:
    """So many along an axis: all are no slice, whose gradient would be another tensor's worth."""
    is_all = is_known(x.shape[axis]) and is_known(count) and x.shape[axis] == count
    return x if is_all else x.narrow(axis, 0, count)


def _chunks(x: Tensor, count: int, size: int, filled: int) -> Tensor:
    """Cut [B, T, H, X] into chunks of `size` tokens, each filled up with zeros: B H N C X."""
    x = _filled(x.transpose(1, 2), count * size - x.shape[1])
    return _filled(x.unflatten(2, (count, size)), filled - size)


def _filled(x: Tensor, count: int) -> Tensor:
    """Append zeros to the last but one axis."""
    nothing = is_known(count) and not count
    return x if nothing else F.pad(x, (0, 0, 0, count))
