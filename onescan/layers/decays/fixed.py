"""One decay per head, the same for every token: RetNet's constants, or learnt as in LION-d."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.checks import check_choice
from onescan.layers.decays.contract import Decay, DecayConfig, Gates
from onescan.ops.numerics import widened
from onescan.shapes import Hidden

Start = Literal["normal", "retnet"]


@dataclass(frozen=True, kw_only=True)
class FixedDecayConfig(DecayConfig):
    """One decay per head, the same for every token (LION-d, RetNet)."""

    start: Start = "normal"
    """First values: sigmoid of a normal draw (LION-d), or 1 - 2^(-5 - head) (RetNet)."""
    learnt: bool = True
    """Learn it, or leave it as it starts."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "FixedDecay":
        check_choice("decay.start", self.start, get_args(Start))
        return FixedDecay(self, num_heads)


class FixedDecay(Decay):
    """lambda = sigmoid(a), one a per head.

    Source: LION, arXiv:2502.16249, Sec. 3.2; RetNet, arXiv:2307.08621.
    """

    logit: Tensor

    def __init__(self, config: FixedDecayConfig, num_heads: int) -> None:
        super().__init__()
        logit = torch.randn(num_heads)
        if config.start == "retnet":
            logit = (2.0 ** (5 + torch.arange(num_heads)) - 1).log()
        if config.learnt:
            self.logit = nn.Parameter(logit)
        else:
            self.register_buffer("logit", logit)

    def forward(self, x: Hidden) -> Gates:
        return Gates(F.logsigmoid(widened(self.logit)[0]))
