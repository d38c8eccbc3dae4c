"""Training images made of two, with labels that say how much of each: MixUp and CutMix.

Source: MixUp, arXiv:1710.09412; CutMix, arXiv:1905.04899; both as timm has them, one or the
other for a whole batch, each image with its mirror place in the batch. kornia's MixUp draws
its shares evenly, not from a Beta distribution, and gives no labels that are shares.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from onescan.data.augment.base import check_ranges
from onescan.shapes import Images

Shares = Float[Tensor, "B classes"]  # how much of each class an image shows; rows sum to 1
Mix = Callable[[Images, Shares, int], tuple[Images, Shares]]


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """MixUp and CutMix, by default as in DeiT."""

    mixup_alpha: float = 0.8
    """MixUp's alpha: both parameters of the Beta distribution; 0 disables MixUp."""
    cutmix_alpha: float = 1.0
    """CutMix's alpha: both parameters of the Beta distribution; 0 disables CutMix."""
    probability: float = 1.0
    """Probability of mixing a batch."""
    switch_probability: float = 0.5
    """Probability of choosing CutMix over MixUp if both are enabled."""

    def build(self) -> Mix:
        """Prepare.

        Raises:
            ValueError: a number is out of its range, or both are off.
        """
        check_ranges(
            "task.mix",
            self,
            mixup_alpha=math.inf,
            cutmix_alpha=math.inf,
            probability=1,
            switch_probability=1,
        )
        if not self.mixup_alpha + self.cutmix_alpha:
            raise ValueError(
                "task.mix.mixup_alpha and task.mix.cutmix_alpha are 0, expected one of them above 0"
            )
        return RandomMix(self)


class RandomMix:
    """A batch of images and labels, mixed with itself in reverse."""

    def __init__(self, config: MixConfig) -> None:
        self.config = config
        if config.mixup_alpha and config.cutmix_alpha:
            self.cutmix_chance = config.switch_probability
        else:
            self.cutmix_chance = float(config.cutmix_alpha > 0)

    def __call__(self, images: Images, shares: Shares, seed: int) -> tuple[Images, Shares]:
        chance = np.random.default_rng(seed)
        if chance.random() >= self.config.probability:
            return images, shares
        if chance.random() < self.cutmix_chance:
            images, other = _paste(images, self.config.cutmix_alpha, chance)
        else:
            other = chance.beta(self.config.mixup_alpha, self.config.mixup_alpha)
            images = images.lerp(images.flip(0), other)
        return images, shares.lerp(shares.flip(0), other)


def _paste(images: Images, alpha: float, chance: np.random.Generator) -> tuple[Images, float]:
    """Put one rectangle of each image's partner onto it; returns the part that it covers.

    Its sides are in the proportion of the image's, and what lies outside is cut off.
    """
    side = math.sqrt(chance.beta(alpha, alpha))
    rows, columns = (_interval(length, side, chance) for length in images.shape[-2:])
    mixed = images.clone()
    mixed[..., rows, columns] = images[..., rows, columns].flip(0)
    height, width = images.shape[-2:]
    return mixed, (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)


def _interval(length: int, part: float, chance: np.random.Generator) -> slice:
    half = int(length * part) // 2
    centre = int(chance.integers(length))
    return slice(max(centre - half, 0), min(centre + half, length))
