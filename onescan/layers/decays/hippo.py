"""A decay per key channel that starts as HiPPO's memory, for long sequences."""

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import nn

from onescan.layers.decays.contract import (
    MOST_LOG_RATE,
    Decay,
    DecayConfig,
    Gates,
    small_linear,
    wide_linear,
)
from onescan.ops.numerics import widened
from onescan.shapes import Hidden

SPREAD = 0.1  # of first weights: LION, App. C.2


@dataclass(frozen=True, kw_only=True)
class HippoDecayConfig(DecayConfig):
    """A decay per key channel that starts as HiPPO's memory, for long sequences."""

    selective: bool = True
    """Let each token scale the exponent by 0 to 2; False leaves it to the head and channel."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "HippoDecay":
        return HippoDecay(width, num_heads, head_width, self.selective)


class HippoDecay(Decay):
    """log lambda = 2 sigmoid(W x) B, or B alone; at first B = -dt (n + 1) for channel n.

    That is the diagonal of HiPPO-LegS, as S4D-Real has it (arXiv:2206.11893), with steps dt drawn
    per head from 0.001 to 0.1. What is learnt is log(-B), so that B stays below 0.

    Source: LION, arXiv:2502.16249, App. C.2. The paper's lambda = exp(sigmoid(A) + B) may exceed
    1. This one cannot, and is HiPPO's where W x is 0.
    """

    no_weight_decay = frozenset({"log_rate"})

    def __init__(self, width: int, num_heads: int, head_width: int, selective: bool) -> None:
        super().__init__()
        log_dt = torch.empty(num_heads, 1).uniform_(math.log(1e-3), math.log(1e-1))
        self.log_rate = nn.Parameter(log_dt + torch.arange(1, head_width + 1).log())  # H K
        self.to_logit = None
        if selective:
            self.to_logit = small_linear(width, num_heads * head_width, bias=False, std=SPREAD)

    def forward(self, x: Hidden) -> Gates:
        log_decay = -widened(self.log_rate)[0].clamp(max=MOST_LOG_RATE).exp()  # H K
        if self.to_logit is None:
            return Gates(log_decay.expand(*x.shape[:2], -1, -1))
        z = wide_linear(self.to_logit, x)
        z = rearrange(z, "b t (h k) -> b t h k", h=self.log_rate.shape[0])
        return Gates(2 * torch.sigmoid(z) * log_decay)

    @torch.no_grad()
    def init_weights(self, to_q: nn.Linear, to_k: nn.Linear | None, to_v: nn.Linear) -> None:
        """Start W and the maps to q and k at a spread of 0.1, and the one to v by zero-order hold.

        That is diagonal, (lambda - 1) / log lambda (Eq. 236); App. C.2's Lambda^-1 (Lambda - I)
        would turn its sign.
        """
        for linear in (to_q, to_k, self.to_logit):
            if linear is not None:
                nn.init.normal_(linear.weight, std=SPREAD)
        log_decay = -self.log_rate.exp().flatten()
        to_v.weight.copy_(torch.diag(log_decay.expm1() / log_decay))
