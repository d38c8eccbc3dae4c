"""A decay per key channel that starts as HiPPO's memory, for long sequences."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.decays.contract import (
    MOST_LOG_RATE,
    Decay,
    DecayConfig,
    Gates,
    small_linear,
)
from onescan.ops.numerics import widened
from onescan.shapes import Hidden

SPREAD = 0.1  # of first weights: LION, App. C.2

Activation = Literal["sigmoid", "softplus"]


@dataclass(frozen=True, kw_only=True)
class HippoDecayConfig(DecayConfig):
    """A decay per key channel that starts as HiPPO's memory, for long sequences."""

    selective: bool = True
    """Let each token scale the exponent; False leaves it to the head and channel."""
    activation: Activation = "sigmoid"
    """How a token scales it: by 0 to 2, or by 0 to any number. Either is 1 where W x is 0."""
    min_step: float = 0.001
    """Shortest first step dt: a channel n remembers some 1 / (dt (n + 1)) tokens."""
    max_step: float = 0.1
    """Longest first step."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "HippoDecay":
        check_choice("decay.activation", self.activation, get_args(Activation))
        check_positive(**{"decay.min_step": self.min_step, "decay.max_step": self.max_step})
        if self.min_step > self.max_step:
            raise ValueError(
                f"decay.min_step is {self.min_step}, expected at most max_step={self.max_step}"
            )
        return HippoDecay(self, width, num_heads, head_width)


class HippoDecay(Decay):
    """log lambda = 2 sigmoid(W x) B, or B alone; at first B = -dt (n + 1) for channel n.

    That is the diagonal of HiPPO-LegS, as S4D-Real has it (arXiv:2206.11893), with steps dt drawn
    per head, their logarithms evenly. What is learnt is log(-B), so that B stays below 0.

    Source: LION, arXiv:2502.16249, App. C.2. The paper's lambda = exp(sigmoid(A) + B) may exceed
    1. This one cannot, and is HiPPO's where W x is 0. Table 6's row 7 has softplus for sigmoid.
    """

    no_weight_decay = frozenset({"log_rate"})

    def __init__(
        self, config: HippoDecayConfig, width: int, num_heads: int, head_width: int
    ) -> None:
        super().__init__()
        self.config = config
        least, most = math.log(config.min_step), math.log(config.max_step)
        log_dt = torch.empty(num_heads, 1).uniform_(least, most)
        self.log_rate = nn.Parameter(log_dt + torch.arange(1, head_width + 1).log())  # H K
        self.to_logit = None
        if config.selective:
            self.to_logit = small_linear(width, num_heads * head_width, bias=False, std=SPREAD)

    def forward(self, x: Hidden) -> Gates:
        log_decay = -widened(self.log_rate)[0].clamp(max=MOST_LOG_RATE).exp()  # H K
        if self.to_logit is None:
            return Gates(log_decay.expand(*x.shape[:2], -1, -1))
        z = widened(self.to_logit(x))[0]
        z = rearrange(z, "b t (h k) -> b t h k", h=self.log_rate.shape[0])
        return Gates(self._scale(z) * log_decay)

    def _scale(self, z: Tensor) -> Tensor:
        if self.config.activation == "sigmoid":
            return 2 * torch.sigmoid(z)
        return F.softplus(z) / math.log(2)

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
