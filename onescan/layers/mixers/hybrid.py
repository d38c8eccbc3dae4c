"""Hybrid models: attention in every n-th block, and another mixer in all other blocks."""

import math
from dataclasses import dataclass, field, replace
from typing import NoReturn

from onescan.checks import check_whole
from onescan.layers.mixers.contract import Mixer, MixerConfig
from onescan.layers.mixers.lightnet import LightNetMixerConfig
from onescan.layers.mixers.softmax import SoftmaxMixerConfig
from onescan.shapes import Grid


@dataclass(frozen=True, kw_only=True)
class HybridMixerConfig(MixerConfig):
    """Attention in every n-th block of a model, and a mixer of linear cost in the others.

    Each block has one of the two mixers: a model of 8 blocks with period=4 has attention in blocks
    3 and 7, counted from 0. Either both mixers must be causal, or neither.

    >>> config = HybridMixerConfig(attention=SoftmaxMixerConfig(window=128), period=2, num_heads=4)
    >>> [type(config.for_layer(i)).__name__ for i in range(2)], config.for_layer(1).num_heads
    (['LightNetMixerConfig', 'SoftmaxMixerConfig'], 4)
    """

    num_heads: int | None = None  # type: ignore[assignment]  # only for_layer's configs are built
    """Number of heads of both mixers; None for those of their own configs."""
    linear: MixerConfig = field(default_factory=LightNetMixerConfig)
    """Mixer of all blocks without attention."""
    attention: MixerConfig = field(default_factory=SoftmaxMixerConfig)
    """Mixer of every n-th block. With a window, its state does not grow."""
    period: int = 4
    """n: one of every n blocks has attention."""
    offset: int = -1
    """Index of the block with attention in each group of n blocks, from the end if negative."""

    @property
    def state_block(self) -> int | None:
        linear, attention = self.linear.state_block, self.attention.state_block
        return None if linear is None or attention is None else math.lcm(linear, attention)

    @property
    def state_grows(self) -> bool:
        return self.linear.state_grows or self.attention.state_grows

    @property
    def takes(self) -> frozenset[str]:
        return self.linear.takes | self.attention.takes

    @property
    def skips_padding(self) -> bool:
        return self.linear.skips_padding and self.attention.skips_padding

    @property
    def fits_any_grid(self) -> bool:
        return self.linear.fits_any_grid and self.attention.fits_any_grid

    def for_grid(self, grid: Grid) -> MixerConfig:
        mixers = (self.linear.for_grid(grid), self.attention.for_grid(grid))
        return replace(self, linear=mixers[0], attention=mixers[1])

    def check_padding(self, grid: Grid) -> None:
        self.linear.check_padding(grid)
        self.attention.check_padding(grid)

    def for_layer(self, index: int) -> MixerConfig:
        """Return the config for block `index` of a model, counted from 0.

        Each mixer counts only its own blocks, so that directions alternate between those.

        Raises:
            ValueError: If period or offset is out of range or not a whole number, or only one of
                the mixers is causal.
        """
        check_whole(1, **{"mixer.period": self.period})
        check_whole(-self.period, **{"mixer.offset": self.offset})
        if self.offset >= self.period:
            raise ValueError(
                f"mixer.offset is {self.offset}, expected {-self.period} to {self.period - 1} with "
                f"period {self.period}"
            )
        if self.linear.is_causal != self.attention.is_causal:
            causal, other = ("linear", "attention")[:: 1 if self.linear.is_causal else -1]
            raise ValueError(
                f"mixer.{causal} is causal and mixer.{other} is not, expected both or neither"
            )
        offset = self.offset % self.period
        before = (index - offset + self.period - 1) // self.period  # blocks with attention
        if index % self.period == offset:
            config = self.attention.for_layer(before)
        else:
            config = self.linear.for_layer(index - before)
        return config if self.num_heads is None else replace(config, num_heads=self.num_heads)

    def init_for_layer(self, mixer: Mixer, index: int, depth: int) -> None:
        is_attention = index % self.period == self.offset % self.period
        (self.attention if is_attention else self.linear).init_for_layer(mixer, index, depth)

    def build(self, *, width: int, axes: int) -> NoReturn:
        """Raise ValueError, because a hybrid describes the mixers of all blocks of a model."""
        raise ValueError(
            "HybridMixerConfig describes the mixers of all blocks and cannot be built: "
            "expected the config of one block, for_layer(index)"
        )
