"""What a random change of training images is."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from onescan.shapes import Images

# pixels from 0 to 1 on any device, and a seed that all chance comes from; gives the same again
Augment = Callable[[Images, int], Images]


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(ABC):
    """Random changes of training images, as a batch on the device that trains."""

    @abstractmethod
    def build(self) -> Augment:
        """Prepare.

        Raises:
            ValueError: a range is not one.
        """


def check_ranges(path: str, config: object, **largest: int | float) -> None:
    """Raise ValueError for a field that is not from 0 to its largest value, or not finite.

    Args:
        path: how the user spells the config.
        config: holds the fields.
        largest: field=largest value, which may be infinity.

    >>> check_ranges("point", 3 + 4j, real=2)
    Traceback (most recent call last):
    ValueError: point.real is 3.0, expected 0 to 2
    """
    for name, most in largest.items():
        value = getattr(config, name)
        if not (0 <= value <= most and value < math.inf):
            expected = "0 or more" if most == math.inf else f"0 to {most}"
            raise ValueError(f"{path}.{name} is {value}, expected {expected}")
