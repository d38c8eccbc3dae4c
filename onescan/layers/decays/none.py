"""No decay: linear attention, and LION-lit."""

from dataclasses import dataclass

from onescan.layers.decays.contract import Decay, DecayConfig, Gates
from onescan.shapes import Hidden


@dataclass(frozen=True, kw_only=True)
class NoDecayConfig(DecayConfig):
    """Nothing is forgotten: linear attention (LION-lit)."""

    def build(self, *, width: int, num_heads: int, head_width: int) -> "NoDecay":
        return NoDecay()


class NoDecay(Decay):
    """lambda = 1."""

    def forward(self, x: Hidden) -> Gates:
        return Gates(None)
