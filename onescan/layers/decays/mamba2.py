"""Mamba-2's decay: a step size chosen by the token, times a rate learnt per head."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from onescan.layers.decays.contract import (
    MOST_LOG_RATE,
    Decay,
    DecayConfig,
    Gates,
    small_linear,
)
from onescan.ops.numerics import widened
from onescan.shapes import Hidden


@dataclass(frozen=True, kw_only=True)
class Mamba2DecayConfig(DecayConfig):
    """A step size that each token chooses, times a rate per head (Mamba-2)."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "Mamba2Decay":
        return Mamba2Decay(width, num_heads)


class Mamba2Decay(Decay):
    """dt = softplus(W x + b), lambda = exp(-exp(log_rate) dt), and the key is multiplied by dt.

    Source: Mamba-2, arXiv:2405.21060, with its first values: dt from 0.001 to 0.1, rates
    from 1 to 16. LION prints lambda = softplus(W x), which exceeds 1: a misprint.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        dt = torch.empty(num_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.to_dt = small_linear(width, num_heads, bias=False)
        self.dt_bias = nn.Parameter(dt.expm1().log())  # softplus of it is dt
        self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())

    def forward(self, x: Hidden) -> Gates:
        z = widened(self.to_dt(x))[0]
        dt = F.softplus(z + self.dt_bias.to(z.dtype))  # B T H
        rate = self.log_rate.to(z.dtype).clamp(max=MOST_LOG_RATE).exp()
        return Gates(-rate * dt, dt.unsqueeze(-1))
