"""Which part of an image is read: the middle, all of it, or a random part."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Box = tuple[float, float, float, float]  # left, upper, right, lower; in pixels
Crop = Callable[[int, int], Box]  # of an image's width and height

ATTEMPTS = 10


def centre_box(width: int, height: int, *, aspect: float, part: float) -> Box:
    """Cut the largest box of an aspect out of the middle, then keep a part of each of its sides.

    >>> centre_box(40, 20, aspect=1.0, part=0.5)
    (15.0, 5.0, 25.0, 15.0)
    """
    tall = part * min(height, width / aspect)
    wide = tall * aspect
    left, upper = (width - wide) / 2, (height - tall) / 2
    return left, upper, left + wide, upper + tall


@dataclass(frozen=True, kw_only=True)
class RandomCropConfig:
    """Random resized crop of training images."""

    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of the crop, as a fraction of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest aspect ratio (width over height) of the crop."""

    def build(self) -> "RandomCrop":
        """Prepare.

        Raises:
            ValueError: a range is not one, or asks for more than the image.
        """
        for name, highest in (("scale", 1.0), ("ratio", math.inf)):
            low, high = getattr(self, name)
            if not (0 < low <= high <= highest and high < math.inf):
                raise ValueError(
                    f"data.train_crop.{name} is {(low, high)}, expected two numbers, "
                    f"above 0{' and at most 1' if name == 'scale' else ''}, the smaller first"
                )
        return RandomCrop(self)


class RandomCrop:
    """A box of random area, aspect and place; the middle where none that was drawn fits.

    It is torchvision's RandomResizedCrop, but for corners that may lie between pixels.
    """

    def __init__(self, config: RandomCropConfig) -> None:
        self.config = config

    def __call__(self, width: int, height: int, seed: int) -> Box:
        random = Random(seed)
        narrowest, widest = self.config.ratio
        for _ in range(ATTEMPTS):
            area = random.uniform(*self.config.scale) * width * height
            aspect = math.exp(random.uniform(math.log(narrowest), math.log(widest)))
            wide, tall = math.sqrt(area * aspect), math.sqrt(area / aspect)
            if wide <= width and tall <= height:
                left, upper = random.uniform(0, width - wide), random.uniform(0, height - tall)
                return left, upper, left + wide, upper + tall
        aspect = min(max(width / height, narrowest), widest)
        return centre_box(width, height, aspect=aspect, part=1.0)
