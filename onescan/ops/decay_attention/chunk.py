"""Decayed attention in chunks, O(T) in both directions: attention inside, states in between.

Each direction carries one state from chunk to chunk; inside a chunk the scores are computed once
for both. Nothing is larger than the C x C scores of all chunks together, T C numbers a head.

Source: LION, arXiv:2502.16249, Sec. 3.4. States carried both ways are not in the paper, whose
chunks (Eq. 81) meet every other chunk.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from onescan.checks import can_look_at_values
from onescan.ops.chunks import carry, is_known, length_of_chunks, number_of_chunks, passed_on
from onescan.ops.decay_attention.directions import Directions, Matrices, Sums
from onescan.ops.decay_attention.tile import Reach, padded, tile
from onescan.shapes import Keys, Queries, Values

CACHED = 1 << 19  # scores or values that a CPU's caches hold
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
) -> Sums:
    size = length_of_chunks(chunk_size, k.shape[1])
    if not can_look_at_values(q):  # lengths may be symbols then
        return _forward(q, k, v, decays, enters, size=size, return_state=return_state)
    samples, heads = _at_once(q, v, size)
    batch = _counted(len(q), samples)
    rows = []
    for row in _cut((q, k, v, *decays, *enters), (0,) * len(HEADS), samples, batch):
        parts = []
        for piece in _cut(row, HEADS, heads, _counted(q.shape[2], heads)):
            queries, keys, values, from_left, from_right, left, right = piece
            inside, outside = Directions(from_left, from_right), Matrices(left, right)
            parts.append(
                _forward(
                    queries, keys, values, inside, outside, size=size, return_state=return_state
                )
            )
        rows.append(_joined(parts, of_outputs=2, of_states=1))
    return _joined(rows, of_outputs=0, of_states=0)


def _at_once(q: Queries, v: Values, size: int) -> tuple[int, int]:
    """How many samples, and how many heads of one where it is large."""
    batch, tokens, heads, _ = q.shape
    of_head = tokens * max(size, v.shape[-1])
    # gradients keep what lies in between, so no cache holds it
    most = KEPT if torch.is_grad_enabled() else CACHED
    samples = min(batch, max(1, most // (of_head * heads)))
    return samples, heads if samples > 1 else min(heads, max(1, KEPT // of_head))


def _counted(total: int, at_once: int) -> int:
    return -(-total // at_once) if at_once else 1


def _cut(
    tensors: Sequence[Any], axes: Sequence[int], length: int, count: int
) -> list[tuple[Any, ...]]:
    """So many pieces of each; what all share, or is not there, is part of every piece."""
    if count == 1:
        return [tuple(tensors)]
    pieces = (
        [x] * count if x is None or x.shape[axis] == 1 else x.split(length, dim=axis)
        for x, axis in zip(tensors, axes, strict=True)
    )
    return list(zip(*pieces, strict=True))


def _joined(parts: list[Any], *, of_outputs: int, of_states: int) -> Any:
    """One result of several, along an axis of the outputs and one of the states."""
    if len(parts) == 1:
        return parts[0]
    outputs, leaves = zip(*parts, strict=True)
    sides = (
        None if side[0] is None else torch.cat(side, dim=of_states)
        for side in zip(*leaves, strict=True)
    )
    return torch.cat(outputs, dim=of_outputs), Matrices(*sides)


def _forward(
    q: Queries,
    k: Keys,
    v: Values,
    decays: Directions,
    enters: Matrices,
    *,
    size: int,
    return_state: bool,
) -> Sums:
    tokens = k.shape[1]
    count = number_of_chunks(tokens, size)
    filled = padded(size, is_diagonal=decays.is_diagonal)
    q, k, v = (_chunks(x, count, size, filled) for x in (q, k, v))  # B H N C .
    forward, backward = (None if x is None else _chunks(x, count, size, filled) for x in decays)
    assert forward is not None

    # 1. inside each chunk, both directions at once
    scores, from_left, from_right = tile(q, k, forward, backward)
    o = scores @ v  # B H N C V

    # 2. from chunk to chunk, each direction its state
    read, left = _passed(q, k, v, from_left, enters.left, return_state=return_state)
    o, right = o if read is None else o + read, None
    if from_right is not None:
        read, right = _passed(
            q, k, v, from_right, enters.right, return_state=return_state, backward=True
        )
        o = o if read is None else o + read
    o = rearrange(o[..., :size, :], "b h n c v -> b (n c) h v").narrow(1, 0, tokens)
    return o, Matrices(left, right)


def _passed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: Reach,
    state: Tensor | None,
    *,
    return_state: bool,
    backward: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Pass a state from chunk to chunk.

    Returns:
        What the tokens read of the states that enter their chunks, [B, H, N, C, V], and the state
        that leaves the last chunk visited; None where there is nothing to read, or none asked for.
    """
    alone = is_known(k.shape[2]) and k.shape[2] == 1 and state is None
    if alone and not return_state:
        return None, None
    added = (k * reach.leave).mT @ v  # B H N K V
    if alone:
        return None, added[:, :, 0]
    state = torch.zeros_like(added[:, :, 0]) if state is None else state
    before, state = passed_on(carry, state, added, reach.through.mT, backward=backward)
    return (q * reach.enter) @ before, state


def _chunks(x: Tensor, count: int, size: int, filled: int) -> Tensor:
    """Cut [B, T, H, X] into chunks of `size` tokens, each filled up with zeros: B H N C X."""
    x = _filled(x.transpose(1, 2), count * size - x.shape[1])
    return _filled(x.unflatten(2, (count, size)), filled - size)


def _filled(x: Tensor, count: int) -> Tensor:
    """Append zeros to the last but one axis, in one pass."""
    nothing = is_known(count) and not count
    return x.contiguous() if nothing else F.pad(x, (0, 0, 0, count))
