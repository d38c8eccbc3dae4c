"""The implicit step, (I - dt/2 L) h' = (I + dt/2 L) h with L = K - diag(K 1).

It is computed as h' = 2 y - h with A y = h and A = I + diag(dt/2 K 1) - dt/2 K. In blocks of C >= R
tokens, A is block tridiagonal. It is factored from the first block to the last, once per head, and
the backward pass solves with the transposed factors:

    D_i = A_ii - B_i G_{i-1},   G_i = D_i^-1 N_i
    z_i = D_i^-1 (h_i + B_i z_{i-1}),   y_i = z_i + G_i y_{i+1}

with B_i and N_i the coupling to the block before and the next one, and

    A^T g = dy,   dh = g,   dK = g y^T,   d(K 1) = -g y

Each diagonal entry of A exceeds the sum of the rest of its row, so elimination is stable. A step of
n times the stable one loses about log10(n) digits, hence float64.

Source: LDN, arXiv:2502.12381, Sec. 3.3.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onescan.ops.chunks import needs_plain_functions
from onescan.ops.linear_diffusion.forms import (
    banded_product,
    correlation,
    diagonal_sums,
    row_sums_of,
    toeplitz_matrix,
)
from onescan.ops.numerics import to_float64
from onescan.shapes import DiffusionKernels, Keep, RowSums, Systems, Values

SOLVE_BLOCK = 32  # linear systems with fewer tokens are no faster


def crank_nicolson(
    size: int | None, x: Values, rates: DiffusionKernels, keep: Keep | None
) -> Values:
    """Compute the implicit step in blocks of `size` tokens; `rates` is dt K.

    Without `keep`, all sequences and channels are right-hand sides of the same system.
    """
    wide_x, half = to_float64(x), to_float64(rates) / 2
    row_sums = row_sums_of(banded_product, half, keep, x.shape[1]).squeeze(3).permute(2, 0, 1)
    systems = wide_x.permute(2, 0, 1, 3)  # H B T V
    if keep is None:
        systems = systems.transpose(1, 2).flatten(2).unsqueeze(1)
    y = _solve(systems, half, row_sums, keep, size)
    if keep is None:
        y = y.squeeze(1).unflatten(2, (x.shape[0], x.shape[3])).transpose(1, 2)
    return (2 * y.permute(1, 2, 0, 3) - wide_x).to(x.dtype)


def solve_block_size(radius: int) -> int:
    """Return C, the block size for which a block is coupled only to its two neighbors."""
    return max(SOLVE_BLOCK, radius)


# Block sizes by form: "dense" in O(T^3) is a single block, "banded" takes O(T C^2).
SOLVERS: dict[str, Callable[[int], int | None]] = {
    "dense": lambda radius: None,
    "banded": solve_block_size,
}


def _solve(
    rhs: Systems, weights: DiffusionKernels, row_sums: RowSums, keep: Keep | None, size: int | None
) -> Systems:
    """Solve (I + diag(K 1) - K) y = rhs.

    Args:
        rhs: Right-hand sides: one system for each sequence, or one for all.
        weights: dt/2 K.
        row_sums: Row sums of dt/2 K over real tokens.
        keep: True for real tokens of each system; None keeps all.
        size: Tokens per block; None for a single block.
    """
    if torch.compiler.is_compiling() or needs_plain_functions(rhs, weights, row_sums):
        return _substituted(_factors(weights, row_sums, keep, size), rhs)
    return _Solve.apply(rhs, weights, row_sums, keep, size)


class _Block(NamedTuple):
    """Factors of a block: the LU decomposition of D, B (empty for the first), G (for the last)."""

    lu: Tensor
    pivots: Tensor
    before: Tensor
    gain: Tensor


def _factors(
    weights: Tensor, row_sums: Tensor, keep: Tensor | None, size: int | None
) -> list[_Block]:
    """Factor A, [heads, systems, T, T], by block elimination."""
    tokens, none = row_sums.shape[-1], weights.new_empty(0)
    if size is None:
        coupling = torch.stack([toeplitz_matrix(w, tokens, tokens) for w in weights])
        system = torch.diag_embed(1 + row_sums) - _masked(coupling, keep, keep)
        lu, pivots, _ = torch.linalg.lu_factor_ex(system)  # lu_factor would wait for a GPU
        return [_Block(lu, pivots, none, none)]
    padding = -tokens % size
    diagonals = torch.diag_embed(
        F.pad(1 + row_sums, (0, padding), value=1.0).unflatten(2, (-1, size))
    )
    count = diagonals.shape[2]
    masks: list[Tensor | None] = [None] * count
    if keep is not None:
        masks = [*F.pad(keep, (0, padding)).unflatten(1, (-1, size)).unbind(1)]
    elif padding:  # no token reads the padding
        masks[-1] = torch.arange(size, device=weights.device).unsqueeze(0) < size - padding
    pair = torch.stack([toeplitz_matrix(w, 2 * size, 2 * size) for w in weights])
    within, after, before = pair[:, :size, :size], pair[:, :size, size:], pair[:, size:, :size]
    blocks: list[_Block] = []
    for i, diagonal in enumerate(diagonals.unbind(2)):
        system = diagonal - _masked(within, masks[i], masks[i])
        from_before = gain = none
        if i:
            from_before = _masked(before, masks[i], masks[i - 1])
            system = system - from_before @ blocks[-1].gain
        lu, pivots, _ = torch.linalg.lu_factor_ex(system)
        if i + 1 < count:
            gain = torch.linalg.lu_solve(lu, pivots, _masked(after, masks[i], masks[i + 1]))
        blocks.append(_Block(lu, pivots, from_before, gain))
    return blocks


def _masked(block: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return a block of each head's kernel for each system, zero where a token is masked."""
    block = block.unsqueeze(1)  # heads systems C C
    block = block if rows is None else block * rows.unsqueeze(2)
    return block if columns is None else block * columns.unsqueeze(1)


def _split(x: Tensor, blocks: Sequence[_Block]) -> Sequence[Tensor]:
    """Split [heads, systems, T, n] into blocks of tokens; the last one is padded with zeros."""
    if len(blocks) == 1 and blocks[0].lu.shape[-1] == x.shape[2]:
        return [x]
    size = blocks[0].lu.shape[-1]
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size)).unbind(2)


def _joined(blocks: Sequence[Tensor], tokens: int) -> Tensor:
    joined = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=2)
    return joined.narrow(2, 0, tokens)


def _substituted(blocks: Sequence[_Block], rhs: Tensor) -> Tensor:
    """Solve A y = rhs with the factors of A."""
    z: list[Tensor] = []
    for block, b in zip(blocks, _split(rhs, blocks), strict=True):
        b = b + block.before @ z[-1] if z else b
        z.append(torch.linalg.lu_solve(block.lu, block.pivots, b))
    y = [z.pop()]
    for block in blocks[-2::-1]:
        y.append(z.pop() + block.gain @ y[-1])
    return _joined(y[::-1], rhs.shape[2])


def _transposed_substituted(blocks: Sequence[_Block], rhs: Tensor) -> Tensor:
    """Solve A^T y = rhs with the factors of A."""
    w: list[Tensor] = []
    for i, b in enumerate(_split(rhs, blocks)):
        w.append(b if not i else b + blocks[i - 1].gain.mT @ w[-1])
    y: list[Tensor] = []
    for i in reversed(range(len(blocks))):
        b = w[i] if not y else w[i] + blocks[i + 1].before.mT @ y[-1]
        y.append(torch.linalg.lu_solve(blocks[i].lu, blocks[i].pivots, b, adjoint=True))
    return _joined(y[::-1], rhs.shape[2])


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rhs: Tensor,
        weights: Tensor,
        row_sums: Tensor,
        keep: Tensor | None,
        size: int | None,
    ) -> Tensor:
        blocks = _factors(weights, row_sums, keep, size)
        y, ctx.size = _substituted(blocks, rhs), size
        ctx.save_for_backward(weights, row_sums, keep, y, *(x for block in blocks for x in block))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weights, row_sums, keep, y, *parts = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives: A^T has the reversed kernel
            g = _solve(dy, weights.flip(1), row_sums, keep, ctx.size)
        else:
            blocks = [_Block(*parts[i : i + 4]) for i in range(0, len(parts), 4)]
            g = _transposed_substituted(blocks, dy)
        dweights = None
        if ctx.needs_input_grad[1]:
            dweights = _kernel_gradient(g, y, weights, keep, ctx.size)
        return g, dweights, -(g * y).sum(3), None, None


def _kernel_gradient(
    g: Tensor, y: Tensor, weights: Tensor, keep: Tensor | None, size: int | None
) -> Tensor:
    """Sum g_t y_{t-r} over real tokens, systems and right-hand sides for each head and lag r."""
    if keep is not None:
        g, y = (x * keep.unsqueeze(2) for x in (g, y))
    if size is None:
        radius = weights.shape[1] // 2
        pairs = F.pad((g @ y.mT).sum(1), (radius, radius))
        return torch.stack([diagonal_sums(head, radius) for head in pairs])
    columns = ([head.transpose(0, 1).flatten(1) for head in x] for x in (g, y))
    return torch.stack([correlation(*x) for x in zip(*columns, weights, strict=True)])
