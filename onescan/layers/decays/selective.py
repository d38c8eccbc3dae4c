"""A decay chosen by the token: LION-s, and gated RFA where it weighs the key too."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange

from onescan.layers.decays.contract import Decay, DecayConfig, Gates, small_linear
from onescan.ops.numerics import widened
from onescan.shapes import Hidden


@dataclass(frozen=True, kw_only=True)
class SelectiveDecayConfig(DecayConfig):
    """A decay that each token chooses (LION-s, gated RFA)."""

    diagonal: bool = False
    """One decay per key channel, instead of one per head."""
    couple_key: bool = False
    """Multiply the key by 1 - decay, so that what enters makes up for what leaves."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "SelectiveDecay":
        return SelectiveDecay(self, width, num_heads, head_width)


class SelectiveDecay(Decay):
    """lambda = sigmoid(W x + b); the key's 1 - lambda is sigmoid(-W x - b), which keeps its digits.

    Source: LION, arXiv:2502.16249, Sec. 3.2; coupled, gated RFA as in its Eq. 199.
    """

    def __init__(
        self, config: SelectiveDecayConfig, width: int, num_heads: int, head_width: int
    ) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.to_logit = small_linear(
            width, num_heads * (head_width if config.diagonal else 1), bias=True
        )

    def forward(self, x: Hidden) -> Gates:
        z = rearrange(widened(self.to_logit(x))[0], "b t (h k) -> b t h k", h=self.num_heads)
        log_decay = F.logsigmoid(z)
        key = torch.sigmoid(-z) if self.config.couple_key else None
        return Gates(log_decay if self.config.diagonal else log_decay.squeeze(-1), key)
