"""The block every model stacks: a mixer, then an MLP, each behind a norm and around a shortcut."""

from typing import Any

import torch
from torch import Tensor, nn

from onescan.layers.mixers import MixerConfig
from onescan.layers.mlp import MLPConfig
from onescan.layers.norm import NormName, build_norm
from onescan.shapes import Grid, Hidden, Keep


class Block(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    def __init__(
        self,
        width: int,
        *,
        axes: int,
        mixer: MixerConfig,
        mlp: MLPConfig,
        norm: NormName,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.mixer_norm = build_norm(norm, width)
        self.mixer = mixer.build(width=width, axes=axes)
        self.mlp_norm = build_norm(norm, width)
        self.mlp = mlp.build(width=width)
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: Any = None
    ) -> tuple[Hidden, Any]:
        mixed, state = self.mixer(self.mixer_norm(x), grid, keep=keep, state=state)
        x = x + self.drop_path(mixed)
        x = x + self.drop_path(self.mlp(self.mlp_norm(x)))
        return x, state


class DropPath(nn.Module):
    """While training, drop a sample's whole branch with probability `rate`; scale up the rest.

    Source: stochastic depth, arXiv:1603.09382.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path is {rate}, expected a probability from 0 to below 1")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device) >= self.rate
        return x * (kept / (1 - self.rate)).to(x.dtype)
