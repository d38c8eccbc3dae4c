"""xLSTM's matrix memory: a forget gate, and an exponential input gate on the keys."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from onescan.layers.decays.contract import Decay, DecayConfig, Gates, small_linear
from onescan.ops.numerics import widened
from onescan.shapes import Hidden

INPUT_CAP = 15.0


@dataclass(frozen=True, kw_only=True)
class XLSTMDecayConfig(DecayConfig):
    """A forget gate and an exponential input gate that each token chooses (xLSTM)."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "XLSTMDecay":
        return XLSTMDecay(width, num_heads)


class XLSTMDecay(Decay):
    """f = sigmoid(W_f x + b_f), and the key is multiplied by exp(cap(W_i x + b_i)).

    Source: xLSTM, arXiv:2405.04517. cap(z) = 15 tanh(z / 15), as in xLSTM 7B,
    arXiv:2503.13427, so that the exponential cannot overflow; then no running maximum is needed.
    Forget gates start from 3 to 6 over the heads.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.to_forget = small_linear(width, num_heads, bias=False)
        self.to_input = small_linear(width, num_heads, bias=True)
        self.forget_bias = nn.Parameter(torch.linspace(3, 6, num_heads))

    def forward(self, x: Hidden) -> Gates:
        forget, enter = widened(self.to_forget(x), self.to_input(x))
        enter = INPUT_CAP * torch.tanh(enter / INPUT_CAP)
        log_decay = F.logsigmoid(forget + self.forget_bias.to(forget.dtype))
        return Gates(log_decay, enter.exp().unsqueeze(-1))
