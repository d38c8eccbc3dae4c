"""What needle.json holds: which needles a model found, at which lengths and depths."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from onescan import configs
from onescan.checkpoint.files import damaged, parse_json
from onescan.evaluation.asked import NeedleConfig

ANEW = "remove it to measure anew, or choose another folder"

Cells = Float[np.ndarray, "depths lengths"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one needle at one depth."""

    length: int
    depth: float
    trial: int
    right: bool
    """Whether greedy decoding gives the number."""
    log_probability: float
    """Of the number after the question, in nats."""
    without: float
    """The same where the needle is taken out."""

    @property
    def gain(self) -> float:
        """What the needle adds to the log-probability."""
        return self.log_probability - self.without


@dataclass(frozen=True, kw_only=True)
class NeedleGrid:
    """All outcomes of one model in one text."""

    name: str
    """Of the model."""
    weights: str
    """What other weights have another of."""
    haystack: str
    """Where the text is from."""
    text: str
    """What another text has another of."""
    onescan: str
    asked: NeedleConfig
    """By the last call."""
    outcomes: tuple[Outcome, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Those of which something is known, from the shortest."""
        return sorted({outcome.length for outcome in self.outcomes})

    def holds(self, length: int, trial: int) -> bool:
        """Whether a needle is measured."""
        return any(each.length == length and each.trial == trial for each in self.outcomes)

    def accuracy(self) -> Cells:
        """The share of needles that are found."""
        return self._means(lambda outcome: float(outcome.right))

    def gain(self) -> Cells:
        """What a needle adds to its number's log-probability, in nats."""
        return self._means(lambda outcome: outcome.gain)

    def _means(self, number: Callable[[Outcome], float]) -> Cells:
        cells: dict[tuple[float, int], list[float]] = {}
        for outcome in self.outcomes:
            cells.setdefault((outcome.depth, outcome.length), []).append(number(outcome))
        depths = sorted(self.asked.depths)
        return np.array([[np.mean(cells[d, length]) for length in self.lengths] for d in depths])


def going_on(path: Path, fresh: NeedleGrid) -> NeedleGrid:
    """What is known before the first needle: `fresh`, with the outcomes that the file holds.

    Lengths and trials may be added.

    Raises:
        ValueError: the file is damaged, or holds outcomes of something else.
    """
    if not path.exists():
        return fresh
    there = _read(path)
    for where, x, y in configs.differences(_fixed(there), _fixed(fresh)):
        raise ValueError(
            f"{path} holds what was measured with {where} {x!r}, and not {y!r}: choose another "
            "folder"
        )
    return dataclasses.replace(fresh, outcomes=there.outcomes)


def _fixed(grid: NeedleGrid) -> NeedleGrid:
    """What may not change from call to call."""
    asked = dataclasses.replace(grid.asked, lengths=(), trials=1, prefill_chunk_size=1)
    return dataclasses.replace(grid, asked=asked, outcomes=())


def _read(path: Path) -> NeedleGrid:
    data = parse_json(path.read_bytes(), path, ANEW)
    if not isinstance(data, dict):
        raise damaged(path, data, ANEW)
    try:
        return configs.from_dict(NeedleGrid, data)
    except ValueError as error:
        raise damaged(path, error, ANEW) from error
