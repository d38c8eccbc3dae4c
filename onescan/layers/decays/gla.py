"""Gated linear attention's decay: one per key channel, through a bottleneck, near 1."""

from dataclasses import dataclass

import torch.nn.functional as F
from einops import rearrange

from onescan.checks import check_positive
from onescan.layers.decays.contract import Decay, DecayConfig, FP32Linear, Gates, small_linear
from onescan.ops.numerics import widened
from onescan.shapes import Hidden

TEMPERATURE = 16


@dataclass(frozen=True, kw_only=True)
class GLADecayConfig(DecayConfig):
    """A decay per key channel that each token chooses, of low rank (GLA)."""

    rank: int = 16
    """Of the map from token to decay."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "GLADecay":
        check_positive(**{"decay.rank": self.rank})
        return GLADecay(width, num_heads, head_width, self.rank)


class GLADecay(Decay):
    """lambda = sigmoid(W_2 W_1 x + b)^(1/16).

    Source: GLA, arXiv:2312.06635.
    """

    def __init__(self, width: int, num_heads: int, head_width: int, rank: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.down = FP32Linear(width, rank, bias=False)
        self.up = small_linear(rank, num_heads * head_width, bias=True)

    def forward(self, x: Hidden) -> Gates:
        z = widened(self.up(self.down(x)))[0]
        log_decay = F.logsigmoid(z) / TEMPERATURE
        return Gates(rearrange(log_decay, "b t (h k) -> b t h k", h=self.num_heads))
