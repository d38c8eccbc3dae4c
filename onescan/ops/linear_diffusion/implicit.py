"""Crank-Nicolson's linear system, (I - dt/2 (K - diag(K 1))) y = rhs.

Source: LDN, arXiv:2502.12381, Sec. 3.3, "implicit integration".

The matrix has 1 + sum_s dt/2 K_ts on its diagonal, which is more than the rest of its row: nothing
has to be exchanged on the way to its solution. Without a mask it is shared by the whole batch.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.linear_diffusion.dense import matrix
from onescan.shapes import DiffusionKernel, RowSums, Systems

Solve = Callable[[Systems, DiffusionKernel, RowSums, Tensor | None], Systems]

BLOCK = 32  # a block of fewer tokens is no faster


def dense(
    rhs: Systems, weights: DiffusionKernel, row_sums: RowSums, keep: Tensor | None
) -> Systems:
    """By elimination, O(T^3).

    Args:
        rhs: of one system per sequence, or of one for all.
        weights: dt/2 K.
        row_sums: of dt/2 K, over real tokens.
        keep: [systems, T], True for real tokens; None is all.
    """
    coupling = matrix(weights, rhs.shape[1], rhs.shape[1])
    if keep is not None:
        coupling = coupling * (keep.unsqueeze(1) & keep.unsqueeze(2))
    return _solved(torch.diag_embed(1 + row_sums) - coupling, rhs)


def banded(
    rhs: Systems, weights: DiffusionKernel, row_sums: RowSums, keep: Tensor | None
) -> Systems:
    """By elimination block by block, O(T C^2) for blocks of C >= R tokens; `dense` says of what.

    A block reads its neighbours only: y_i = z_i + G_i y_{i+1}, from the last block to the first,
    with z and G from the first to the last.
    """
    systems, tokens, _ = rhs.shape
    size = block_size(weights.shape[0] // 2)
    padding = -tokens % size
    if padding:
        keep = rhs.new_ones(systems, tokens, dtype=torch.bool) if keep is None else keep
        rhs, row_sums = F.pad(rhs, (0, 0, 0, padding)), F.pad(row_sums, (0, padding))
        keep = F.pad(keep, (0, padding))
    pair = matrix(weights, 2 * size, 2 * size)  # of two neighbouring blocks
    own, after, before = pair[:size, :size], pair[:size, size:], pair[size:, :size]
    diagonals = torch.diag_embed((1 + row_sums).unflatten(1, (-1, size))).unbind(1)
    kept = [None] * len(diagonals) if keep is None else keep.unflatten(1, (-1, size)).unbind(1)
    z: list[Tensor] = []
    gain: list[Tensor] = []
    for i, (b, diagonal) in enumerate(
        zip(rhs.unflatten(1, (-1, size)).unbind(1), diagonals, strict=True)
    ):
        system = diagonal - _masked(own, kept[i], kept[i])
        if i:
            from_before = _masked(before, kept[i], kept[i - 1])
            system = system - from_before @ gain[-1]
            b = b + from_before @ z[-1]
        to_after = _masked(after, kept[i], kept[i + 1] if i + 1 < len(kept) else kept[i])
        solved = _solved(system, torch.cat([b, to_after.expand_as(system)], dim=-1))
        z.append(solved[..., :-size])
        gain.append(solved[..., -size:])
    moved = [z[-1]]
    for each, g in zip(reversed(z[:-1]), reversed(gain[:-1]), strict=True):
        moved.append(each + g @ moved[-1])
    return torch.cat(moved[::-1], dim=1)[:, :tokens]


def block_size(radius: int) -> int:
    """C, so that a block reads its two neighbours only."""
    return max(BLOCK, radius)


def _solved(system: Tensor, rhs: Tensor) -> Tensor:
    return torch.linalg.solve_ex(system, rhs)[0]  # solve would wait for a GPU to tell of errors


def _masked(block: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """A block of the kernel for each system, with nothing to or from what is masked."""
    if rows is None or columns is None:
        return block.unsqueeze(0)
    return block * (rows.unsqueeze(2) & columns.unsqueeze(1))
