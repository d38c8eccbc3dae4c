"""What mixers share that can read the tokens in one direction or in both."""

from abc import ABC
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor

from onescan.checks import check_choice
from onescan.layers.mixers.contract import MixerConfig
from onescan.shapes import Grid

Direction = Literal["both", "forward", "backward", "alternating"]


@dataclass(frozen=True, kw_only=True)
class DirectedMixerConfig(MixerConfig, ABC):
    """A mixer that reads in one direction or in both."""

    direction: Direction = "both"
    """Read all tokens, those before or after; alternating blocks take turns, forward first."""

    @property
    def is_causal(self) -> bool:
        return self.direction == "forward"

    def for_layer(self, index: int) -> "DirectedMixerConfig":
        if self.direction != "alternating":
            return self
        return replace(self, direction="backward" if index % 2 else "forward")

    def check_direction(self) -> None:
        """Raise ValueError for what is no direction of a single mixer."""
        check_choice("direction", self.direction, get_args(Direction))
        if self.direction == "alternating":
            raise ValueError(
                "direction is 'alternating', which a model has and not one mixer of it: "
                "for_layer(index) says which way that one reads"
            )

    def check_state(self, state: Any, grid: Grid) -> None:
        """Raise ValueError for a state that a call on this grid cannot go on from."""
        if state is None:
            return
        if not self.is_causal:
            raise ValueError("state was given to a mixer that is not causal")
        if len(grid.shape) > 1 or grid.prefix:
            raise ValueError(f"state was given with {grid}, expected one axis and no prefix")


def turned(x: Tensor | None) -> Any:
    """The tokens from the last to the first; what is not of tokens, [H] or None, as it is."""
    return x if x is None or x.ndim == 1 else x.flip(1)
