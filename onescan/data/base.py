"""What a data set is to the rest: examples in an order, read when a batch needs them."""

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from onescan.data.order import derive_seed, epoch_order

Bookmark = dict[str, Any]  # JSON types
MOST_COUNT = 1 << 62  # of anything that a bookmark counts


def check_bookmark(bookmark: Bookmark, first: Bookmark) -> None:
    """Check a bookmark that was read from a file.

    Args:
        bookmark: the one to check.
        first: one of the same kind: an int in it stands for any count, None for any dict or None.

    Raises:
        ValueError: it has other fields than `first`, or a value of another type.

    >>> check_bookmark({"row": -1}, {"row": 0})
    Traceback (most recent call last):
    ValueError: bookmark is {'row': -1}, expected a count as row: remove the state it came from
    """
    expected = None if bookmark.keys() == first.keys() else f"the fields {', '.join(first)}"
    for name, default in first.items() if not expected else ():
        value = bookmark[name]
        if type(default) is int and not (type(value) is int and 0 <= value < MOST_COUNT):
            expected = f"a count as {name}"
        elif not isinstance(default, int) and not isinstance(value, (dict, type(default))):
            expected = f"an object as {name}"
    if expected:
        raise ValueError(
            f"bookmark is {reprlib.repr(bookmark)}, expected {expected}: remove the state it came "
            "from"
        )


class DataConfig(ABC):
    """Where a run's data comes from. Subclasses are frozen dataclasses."""

    @abstractmethod
    def build(self) -> Any:
        """Open the data: training and held-out examples, in the form the task reads."""

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens per sequence; None if there is no limit, or the data is not tokens."""
        return None


class Format:
    """How raw input becomes a model's input; saved with the model. Subclasses are configs."""

    def save(self, folder: Path) -> None:
        """Write to a run's folder what reading input needs beside this config, if anything."""
        del folder


class Example(NamedTuple):
    """One example of a batch, before it is read.

    Attributes:
        source: its place in the data set; of a stream, what the stream holds of it.
        seed: of its own chance, as for a random crop; None for no chance, as when evaluating.
    """

    source: Any
    seed: int | None = None


class Loaded(NamedTuple):
    """What reading a batch gave.

    Attributes:
        batch: the tensors.
        failures: a sentence for each example that could not be read and was replaced or left out.
    """

    batch: tuple[Tensor, ...]
    failures: tuple[str, ...] = ()


class DataSet(ABC):
    """Examples that can be put in order without being read, and read in any process."""

    decodes: bool = False
    """Whether reading is work enough for processes of its own."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the examples of one pass."""

    @abstractmethod
    def read(self, examples: Sequence[Example]) -> Loaded:
        """Read a batch: a function of its argument alone, in whatever process."""

    def examples(
        self,
        *,
        seed: int | None,
        epoch: int = 0,
        start: int = 0,
        repeats: int = 1,
        bookmark: Bookmark | None = None,
    ) -> Iterator[tuple[Example, Bookmark | None]]:
        """Yield one pass, each example with a bookmark of the place after it.

        The same arguments give the same examples, so a run that goes on in mid-epoch reads
        nothing of what came before. One whose places can be looked up needs no bookmark.

        Args:
            seed: what the order and each example's chance come from; None for the stored order
                and no chance.
            epoch: which pass.
            start: how many of the pass' examples come before the first one yielded.
            repeats: every example comes so many times in a row, with chance of its own each time;
                a pass stays as long as it was, so it sees so many times fewer of them.
            bookmark: where `start` is, as yielded before, for what cannot be looked up.
        """
        if seed is None:
            yield from ((Example(place), None) for place in range(start, len(self)))
            return
        order = epoch_order(len(self), seed=seed, epoch=epoch).numpy()  # quicker, one by one
        for turn in range(start, len(self)):
            chance = derive_seed(seed, "example", epoch, turn)
            yield Example(int(order[turn // repeats]), chance), None
