"""RWKV-6's decay: a rate per key channel, moved by the token through a bottleneck."""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import nn

from onescan.checks import check_positive
from onescan.layers.decays.contract import (
    MOST_LOG_RATE,
    Decay,
    DecayConfig,
    FP32Linear,
    Gates,
    small_linear,
)
from onescan.ops.numerics import widened
from onescan.shapes import Hidden


@dataclass(frozen=True, kw_only=True)
class RWKV6DecayConfig(DecayConfig):
    """A rate per key channel that each token moves, of low rank (RWKV-6)."""

    rank: int = 64
    """Of the map from token to rate."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "RWKV6Decay":
        check_positive(**{"decay.rank": self.rank})
        return RWKV6Decay(width, num_heads, head_width, self.rank)


class RWKV6Decay(Decay):
    """lambda = exp(-exp(w + W_2 tanh(W_1 x))), w from -6 to -1 over a head's channels at first.

    Source: RWKV-6, arXiv:2404.05892, without its token shift.
    """

    no_weight_decay = frozenset({"log_rate"})

    def __init__(self, width: int, num_heads: int, head_width: int, rank: int) -> None:
        super().__init__()
        self.down = FP32Linear(width, rank, bias=False)
        self.up = small_linear(rank, num_heads * head_width, bias=False)
        self.log_rate = nn.Parameter(torch.linspace(-6, -1, head_width).repeat(num_heads, 1))  # H K

    def forward(self, x: Hidden) -> Gates:
        z = widened(self.up(torch.tanh(self.down(x))))[0]
        z = rearrange(z, "b t (h k) -> b t h k", h=self.log_rate.shape[0])
        return Gates(-(z + self.log_rate.to(z.dtype)).clamp(max=MOST_LOG_RATE).exp())
