"""What follows the mixer in a block: each token on its own."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from onescan.checks import check_positive
from onescan.shapes import Hidden


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Two layers with GELU and biases, as in ViT and DeiT."""

    ratio: float = 4.0
    """Hidden width over model width."""
    multiple_of: int = 1
    """The hidden width is rounded up to a multiple of this."""

    def build(self, *, width: int) -> nn.Module:
        return MLP(width, self.hidden_width(width))

    def hidden_width(self, width: int) -> int:
        """The hidden width for a model width.

        >>> MLPConfig(ratio=8 / 3).hidden_width(1024), MLPConfig(ratio=0.29).hidden_width(100)
        (2730, 29)
        """
        check_positive(**{"mlp.multiple_of": self.multiple_of})
        hidden = math.floor(width * self.ratio + 1e-6)  # 0.29 * 100 is a little under 29
        return math.ceil(hidden / self.multiple_of) * self.multiple_of


@dataclass(frozen=True, kw_only=True)
class GLUConfig(MLPConfig):
    """A gated linear unit with SiLU and no biases, as in LightNet."""

    ratio: float = 8 / 3

    def build(self, *, width: int) -> nn.Module:
        return GLU(width, self.hidden_width(width))


class MLP(nn.Module):
    """W_2 gelu(W_1 x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.to_hidden = nn.Linear(width, hidden)
        self.to_out = nn.Linear(hidden, width)

    def forward(self, x: Hidden) -> Hidden:
        return self.to_out(F.gelu(self.to_hidden(x)))


class GLU(nn.Module):
    """W_3 (silu(W_1 x) * W_2 x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.to_gate = nn.Linear(width, hidden, bias=False)
        self.to_hidden = nn.Linear(width, hidden, bias=False)
        self.to_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Hidden) -> Hidden:
        return self.to_out(F.silu(self.to_gate(x)) * self.to_hidden(x))
