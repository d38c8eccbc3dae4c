"""What is recalled: accuracy over the number of pairs, and over how far back a pair is."""

from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int

from onescan.report.heat_map import SHARES, Axis, heat_map
from onescan.report.runs import RunGroup
from onescan.report.section import Figure, Section
from onescan.report.words import percent, plural
from onescan.tasks import Recall

MOST_COLUMNS = 8  # distances are taken together in so many

Distances = Int[np.ndarray, "sequences T"]
Right = Bool[np.ndarray, "sequences T"]


def section(study: RunGroup) -> Section:
    """A grid, of all seeds together."""
    distances = study.array("distances").flatten(0, 1).numpy()
    right = study.array("right").flatten(0, 1).numpy()
    pairs = (distances > 0).sum(axis=1)
    rows, columns = np.unique(pairs).tolist(), _columns(int(distances.max()))
    cells = np.array(
        [
            [_share(distances[pairs == row], right[pairs == row], column) for column in columns]
            for row in rows
        ]
    )
    assert isinstance(study.task, Recall)
    longest, seeds = len(distances[0]), plural(len(study.runs), "seed")
    drawn = heat_map(
        cells,
        down=Axis("pairs", [str(row) for row in rows]),
        along=Axis("tokens from the pair to the query", [_name(column) for column in columns]),
        shades=SHARES,
        spell=lambda share: percent(share, 0),
        alt=f"Heat map of accuracy, for {_told(study)}",
    )
    caption = (
        f"Share of the queries that are answered right ({seeds}), in held-out sequences of "
        f"{longest} tokens with so many pairs, where the key that is asked for was so far back. "
        f"An empty cell has no query. Who guesses is right once in {study.task.format.values:,} "
        "times, and once in so many as there are pairs where the values of the sequence are known."
    )
    return Section("What it recalls", (Figure("Accuracy over pairs", drawn, caption, columns=2),))


def _told(study: RunGroup) -> str:
    metrics = study.runs[0].result.metrics
    return ", ".join(f"{name} {value:.0%}" for name, value in metrics.items() if name != "loss")


def _columns(furthest: int) -> list[tuple[int, int]]:
    """Ranges of distances, each as wide as the next.

    >>> _columns(62)[0], _columns(62)[-1], _columns(5)[-1]
    ((1, 8), (57, 64), (5, 5))
    """
    step = -(-furthest // MOST_COLUMNS)
    return [(low + 1, high) for low, high in pairwise(range(0, furthest + step, step))]


def _name(column: tuple[int, int]) -> str:
    first, last = column
    return str(first) if first == last else f"{first}-{last}"


def _share(distances: Distances, right: Right, column: tuple[int, int]) -> float:
    """Of the queries at these distances; NaN where there are none."""
    first, last = column
    there = (first <= distances) & (distances <= last)
    return float(right[there].mean()) if there.any() else np.nan
