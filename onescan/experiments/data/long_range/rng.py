"""Random numbers of generated examples: each example depends only on its index in a split."""

from random import Random

from onescan.checks import check_choice, check_whole
from onescan.experiments.data.order import derive_seed

SPLITS = ("train", "val", "test")


def example_rng(name: str, *, seed: int, split: str, index: int) -> Random:
    """Return the random number generator of one example.

    Only `Random.random` is used, because Python guarantees its sequence across versions.

    Args:
        name: Name of the dataset.
        seed: Random seed of the dataset.
        split: train, val or test.
        index: Index of the example in the split.

    Raises:
        ValueError: If split is unknown, or index is not a whole number of at least 0.
    """
    check_choice("split", split, SPLITS)
    check_whole(0, index=index)
    return Random(derive_seed(name, seed, split, index))


def random_below(rng: Random, count: int) -> int:
    """Draw a whole number from 0 to count - 1."""
    return int(rng.random() * count)
