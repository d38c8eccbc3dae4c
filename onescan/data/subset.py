"""A part of a data set, for what need not look at all of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onescan.data.base import Bookmark, DataSet, Example, Loaded


@dataclass(frozen=True, kw_only=True)
class Spread(DataSet):
    """At most so many examples of a data set, spread evenly over its stored order, for evaluation.

    >>> import torch
    >>> from onescan.data.images import ImageTensors
    >>> five = ImageTensors(images=torch.zeros(5, 1, 2, 2), labels=torch.arange(5))
    >>> [example.source for example, _ in Spread(whole=five, most=3).examples(seed=None)]
    [0, 1, 3]
    """

    whole: DataSet
    most: int

    @property
    def decodes(self) -> bool:  # type: ignore[override]
        """As the whole."""
        return self.whole.decodes

    def __len__(self) -> int:
        return min(self.most, len(self.whole))

    def read(self, examples: Sequence[Example]) -> Loaded:
        return self.whole.read(examples)

    def examples(
        self, *, seed: int | None, **options: Any
    ) -> Iterator[tuple[Example, Bookmark | None]]:
        """Yield the chosen ones; a stream is read to its end."""
        if seed is not None or options:
            raise ValueError(f"seed is {seed} and options are {options}, expected none of them")
        chosen = {i * len(self.whole) // len(self) for i in range(len(self))}
        for place, each in enumerate(self.whole.examples(seed=None)):
            if place in chosen:
                yield each
