"""Tokens first for the user, channels first for the sums: two transpositions around an op."""

import math
from typing import Any

import torch
from torch import Tensor

from onescan.shapes import ChannelsFirst, Hidden


class _Transpose(torch.autograd.Function):
    """x.mT in memory of its own, and so is its gradient.

    The gradient of `x.mT.contiguous()` is a strided view, on which a batched product runs matrix
    by matrix.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mT.contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Transpose.apply(gradient)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _Transpose.apply(tangent)


def channels_first(x: Hidden, shape: tuple[int, ...]) -> ChannelsFirst:
    """[B, T, D] to [D, B, *shape]."""
    return _transposed(x.flatten(0, 1)).view(x.shape[2], x.shape[0], *shape)


def channels_last(x: ChannelsFirst) -> Hidden:
    """[D, B, *shape] to [B, T, D]."""
    return _transposed(x.flatten(1)).view(x.shape[1], math.prod(x.shape[2:]), x.shape[0])


def _transposed(x: Tensor) -> Tensor:
    # a compiler plans the memory of gradients itself, and cannot trace a function with a jvp
    return x.mT.contiguous() if torch.compiler.is_compiling() else _Transpose.apply(x)
