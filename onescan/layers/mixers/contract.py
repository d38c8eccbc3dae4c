"""What every mixer promises, so that a block can hold any of them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import nn

from onescan.shapes import Grid, Hidden, Keep


@dataclass(frozen=True, kw_only=True)
class MixerConfig(ABC):
    """How tokens exchange what they know."""

    num_heads: int = 6
    """Heads; they must divide the width."""

    @abstractmethod
    def build(self, *, width: int, axes: int) -> "Mixer":
        """The module for tokens of this width on a grid of so many axes.

        Raises:
            ValueError: a field that does not go with the others, or with width or axes.
        """

    def for_layer(self, index: int) -> "MixerConfig":
        """The config of a model's block `index`, counted from 0; most are alike in all blocks."""
        return self

    @property
    def is_causal(self) -> bool:
        """Whether a token reads only itself and those before it."""
        return False

    @property
    def prefix_reads_grid(self) -> bool:
        """Whether prefix tokens, a class token say, read any other."""
        return not self.is_causal

    @property
    def normalizes_itself(self) -> bool:
        """Whether the mixer takes tokens as they are, without the norm that a block has for it."""
        return False

    @property
    def reads_embedding(self) -> bool:
        """Whether its forward takes `embedding`, the tokens before the first block."""
        return False

    @property
    def is_bounded(self) -> bool:
        """Whether adding its output keeps tokens within bounds, which scaling it up would break."""
        return False

    def head_width(self, width: int) -> int:
        """Width of one head."""
        if self.num_heads < 1 or width % self.num_heads:
            raise ValueError(f"width {width} is not a multiple of num_heads {self.num_heads}")
        return width // self.num_heads


class Mixer(nn.Module, ABC):
    """Tokens in, tokens out, each having heard of the others."""

    @abstractmethod
    def forward(
        self, x: Hidden, grid: Grid, *, keep: Keep | None = None, state: Any = None
    ) -> tuple[Hidden, Any]:
        """Mix the tokens.

        Args:
            x: tokens, already normalized; if it normalizes them itself, as they are.
            grid: how they lie. A causal mixer's calls after the first go on where the last ended.
            keep: True for real tokens; the others get zero and give nothing.
            state: what a call before returned, causal mixers only; None is the beginning.

        Returns:
            The mixed tokens, and the state after the last (None where there is none).
        """

    def check_state(self, state: Any, kind: type, *, causal: bool) -> None:
        """Raise ValueError for a state that a mixer cannot go on from."""
        if state is None:
            return
        if not causal:
            raise ValueError("state was given to a mixer that is not causal")
        if not isinstance(state, kind):
            raise ValueError(f"state is a {type(state).__name__}, expected a {kind.__name__}")

    def init_weights(self) -> None:
        """Set the first weights for which a model's usual ones will not do; models call it last."""
