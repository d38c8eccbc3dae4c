"""The chance of one example: from its place in a data set alone, so in any order or process."""

from random import Random

from onescan.checks import check_choice
from onescan.data.order import derive_seed

SPLITS = ("train", "val", "test")


def example_chance(name: str, *, seed: int, split: str, index: int) -> Random:
    """Seed what one example is drawn from.

    Only `Random.random` is drawn from: Python promises its numbers to later versions.

    Args:
        name: of the data set.
        seed: of the data set.
        split: train, val or test.
        index: which example of the split, from 0.

    Raises:
        ValueError: split is unknown, or index is no whole number from 0.
    """
    check_choice("split", split, SPLITS)
    check_whole(0, index=index)
    return Random(derive_seed(name, seed, split, index))


def below(chance: Random, count: int) -> int:
    """Draw a whole number from 0 to count - 1."""
    return int(chance.random() * count)


def check_whole(least: int, **numbers: object) -> None:
    """Raise ValueError for what is no whole number of at least `least`.

    >>> check_whole(2, max_args=1)
    Traceback (most recent call last):
    ValueError: max_args is 1, expected a whole number of at least 2
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name} is {number!r}, expected a whole number of at least {least}")
