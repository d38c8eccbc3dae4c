"""HGRN-2's decay: one per key channel, which also makes the keys."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange

from onescan.layers.decays.contract import Decay, DecayConfig, Gates, small_linear
from onescan.ops.numerics import widened
from onescan.shapes import Hidden


@dataclass(frozen=True, kw_only=True)
class HGRN2DecayConfig(DecayConfig):
    """A decay per key channel that each token chooses, and keys of 1 - decay (HGRN-2)."""

    gives_keys: ClassVar[bool] = True

    lower_bound: float = 0.0
    """The least that is kept, from 0 to below 1."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "HGRN2Decay":
        if not 0 <= self.lower_bound < 1:
            raise ValueError(
                f"decay.lower_bound is {self.lower_bound}, expected a number from 0 to below 1"
            )
        return HGRN2Decay(width, num_heads, head_width, self.lower_bound)


class HGRN2Decay(Decay):
    """lambda = l + (1 - l) sigmoid(W x + b), k = 1 - lambda = (1 - l) sigmoid(-W x - b).

    Source: HGRN-2, arXiv:2404.07904, with a lower bound l that is given, not learnt.
    """

    def __init__(self, width: int, num_heads: int, head_width: int, lower_bound: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.lower_bound = lower_bound
        self.to_logit = small_linear(width, num_heads * head_width, bias=True)

    def forward(self, x: Hidden) -> Gates:
        z = rearrange(widened(self.to_logit(x))[0], "b t (h k) -> b t h k", h=self.num_heads)
        bound, key = self.lower_bound, (1 - self.lower_bound) * torch.sigmoid(-z)
        log_decay = F.logsigmoid(z)
        if bound > 0:
            log_decay = math.log1p(-bound) + log_decay
            log_decay = torch.logaddexp(torch.full_like(z, math.log(bound)), log_decay)
        return Gates(log_decay.clamp(max=0), key)  # rounding exceeds 0
