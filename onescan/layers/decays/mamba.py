"""Mamba's decay: an input-dependent step size per head times a rate per key channel."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
class MambaDecayConfig(DecayConfig):
    """Mamba's decay: an input-dependent step size per head times a rate per key channel.

    For Mamba itself, make each channel a separate head with `LionMixerConfig.state_size`.
    """

    rank: int | None = None
    """Rank of the projection to step sizes. None is width / 16, rounded up."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "MambaDecay":
        rank = math.ceil(width / 16) if self.rank is None else self.rank
        check_positive(**{"decay.rank": rank})
        return MambaDecay(width, num_heads, head_width, rank)


class MambaDecay(Decay):
    """dt = softplus(W_2 W_1 x + b), lambda = exp(-exp(log_rate) dt); dt multiplies the key.

    Source: Mamba, arXiv:2312.00752, Sec. 3.2 and Algorithm 2. As in Mamba, A is discretized by
    zero-order hold and B by Euler's rule, rates start at 1 to N over the key channels (A = -rate),
    and step sizes start between 0.001 and 0.1, uniform in their logarithm.
    """

    no_weight_decay = frozenset({"log_rate"})

    def __init__(self, width: int, num_heads: int, head_width: int, rank: int) -> None:
        super().__init__()
        self.down = FP32Linear(width, rank, bias=False)
        self.up = small_linear(rank, num_heads, bias=False)
        dt = torch.empty(num_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt.expm1().log())  # inverse of softplus
        rates = torch.arange(1, head_width + 1).log()
        self.log_rate = nn.Parameter(rates.repeat(num_heads, 1))  # H K

    def forward(self, x: Hidden) -> Gates:
        z = widened(self.up(self.down(x)))[0]
        dt = F.softplus(z + self.dt_bias.to(z.dtype)).unsqueeze(-1)  # B T H 1
        rate = self.log_rate.to(z.dtype).clamp(max=MOST_LOG_RATE).exp()
        return Gates(-rate * dt, dt)

    @torch.no_grad()
    def init_weights(self, to_q: nn.Linear, to_k: nn.Linear | None, to_v: nn.Linear) -> None:
        """Draw W_2 from a uniform distribution within rank^-0.5."""
        bound = self.up.in_features**-0.5
        nn.init.uniform_(self.up.weight, -bound, bound)
