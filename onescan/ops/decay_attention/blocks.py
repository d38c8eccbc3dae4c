"""A square matrix of blocks: some on its diagonal, and products of two factors beside them.

Two neighbouring blocks of L tokens make one of twice the length, and so on: a level. Written or
multiplied in place, every number is touched once; torch.cat would copy the whole at each level.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor]  # rows and columns, [..., S, L, X]: the block is rows @ columns.mT


def assembled(diagonal: Tensor, below: list[Factors], above: list[Factors] | None) -> Tensor:
    """Put the matrix together.

    Args:
        diagonal: the first blocks, [..., S, L, L].
        below: of each level, what each pair has below its diagonal.
        above: likewise above it; None is zero.

    Returns:
        [..., T, T], T = S L.
    """
    if _is_traced(diagonal, *_flat(below, above)):
        return _joined(diagonal, below, above)
    return _Assembled.apply(1 if above is None else 2, diagonal, *_flat(below, above))


def _is_traced(*tensors: Tensor) -> bool:
    """Whether a compiler or an export reads along, and no gradient is asked for.

    Dynamo misreads the arguments of a function then, and ONNX has nothing that works in place.
    """
    if not torch.compiler.is_compiling():
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def _joined(diagonal: Tensor, below: list[Factors], above: list[Factors] | None) -> Tensor:
    """The matrix, each level in new memory."""
    whole = diagonal
    for level, (rows, columns) in enumerate(below):
        first, second = whole.unflatten(-3, (-1, 2)).unbind(-3)
        lower = rows @ columns.mT
        upper = torch.zeros_like(lower)
        if above is not None:
            upper = above[level][0] @ above[level][1].mT
        lines = torch.cat([first, upper], dim=-1), torch.cat([lower, second], dim=-1)
        whole = torch.cat(lines, dim=-2)
    return whole.squeeze(-3)


def _flat(below: list[Factors], above: list[Factors] | None) -> Iterator[Tensor]:
    for level in zip(below, strict=True) if above is None else zip(below, above, strict=True):
        for rows, columns in level:
            yield from (rows, columns)


class _Assembled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(sides: int, diagonal: Tensor, *factors: Tensor) -> Tensor:
        stretches, length = diagonal.shape[-3:-1]
        whole = diagonal.new_zeros(*diagonal.shape[:-3], stretches * length, stretches * length)
        _on_diagonal(whole, length).copy_(diagonal)
        for block, rows, columns in _beside(whole, length, sides, factors):
            block.copy_(rows @ columns.mT)
        return whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.sides, *blocks = inputs
        ctx.save_for_backward(*blocks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_of_blocks(gradient, ctx.sides, *ctx.saved_tensors))


def _of_blocks(gradient: Tensor, sides: int, diagonal: Tensor, *factors: Tensor) -> list[Tensor]:
    """The gradients of the first blocks and of all factors."""
    length = diagonal.shape[-1]
    gradient = gradient.sum_to_size(*diagonal.shape[:-3], *gradient.shape[-2:])
    gradients = [_on_diagonal(gradient, length)]
    for block, rows, columns in _beside(gradient, length, sides, factors):
        gradients += [block @ columns, block.mT @ rows]
    return gradients


def _beside(
    whole: Tensor, length: int, sides: int, factors: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each product's place in the matrix, [..., S, L, L], and its factors."""
    pairs = list(zip(factors[::2], factors[1::2], strict=True))
    for i, (rows, columns) in enumerate(pairs):
        half = length << i // sides
        right = i % sides == 0  # below the diagonal, the rows are the right stretch's
        block = _on_diagonal(whole, 2 * half).unflatten(-2, (2, half)).unflatten(-1, (2, half))
        yield block[..., int(right), :, int(not right), :], rows, columns


def _on_diagonal(whole: Tensor, length: int) -> Tensor:
    """The blocks of so many tokens on the diagonal, a view [..., S, L, L]."""
    blocks = whole.unflatten(-1, (-1, length)).unflatten(-3, (-1, length))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
