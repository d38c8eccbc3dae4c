"""Scores of generated images: inception score, precision and recall."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from numpy.typing import NDArray
from torch import Tensor

PARTS = 10
NEAREST = 3
ROWS, COLUMNS = 1024, 8192  # of pairwise distances that are held at once

Probabilities = Float[Tensor, "B classes"]
Points = Float[Tensor, "_ _"]  # points, features
Radii = Float64[Tensor, " _"]


class Spread(NamedTuple):
    """A score of several parts: its mean, and the standard deviation over the parts."""

    mean: float
    spread: float


class InceptionScore:
    """exp E KL(p(y|x) || p(y)) of parts of the images, as in arXiv:1606.03498, gathered in batches.

    Parts are drawn by one lot, as images often come class by class, and p(y) is the mean over the
    part. Only sums are kept, since the mean of the KL is the mean of sum p log p less that of the
    mean p.
    """

    def __init__(self, total: int, classes: int, parts: int = PARTS) -> None:
        self.total = total
        self.counts = torch.zeros(parts, dtype=torch.float64)
        self.sums = torch.zeros(parts, classes, dtype=torch.float64)
        self.negative_entropies = torch.zeros(parts, dtype=torch.float64)

    def add(self, probabilities: Probabilities, start: int) -> None:
        """Take note of images from the place `start` on, of `total` in all."""
        shares = probabilities.detach().cpu().double()
        places = torch.arange(start, start + len(shares))
        parts = ((shuffled(self.total)[places] + 1) * len(self.counts) - 1) // self.total
        self.counts.index_add_(0, parts, torch.ones(len(shares), dtype=torch.float64))
        self.sums.index_add_(0, parts, shares)
        self.negative_entropies.index_add_(0, parts, torch.xlogy(shares, shares).sum(dim=1))

    def score(self) -> Spread:
        """Mean and spread over the parts; those without images, if any, do not count."""
        counts = self.counts[self.counts > 0]
        means = self.sums[self.counts > 0] / counts[:, None]
        told = self.negative_entropies[self.counts > 0] / counts
        scores = (told - torch.xlogy(means, means).sum(dim=1)).exp()
        return Spread(scores.mean().item(), scores.std(correction=0).item())


def inception_score(probabilities: Probabilities, parts: int = PARTS) -> Spread:
    """Score all images at once; see `InceptionScore`.

    Raises:
        ValueError: there are fewer images than parts.

    >>> inception_score(torch.eye(4), parts=1)  # sure of each, and all are different
    Spread(mean=4.0, spread=0.0)
    """
    if len(probabilities) < parts:
        raise ValueError(f"there are {len(probabilities)} images, expected {parts} at least")
    score = InceptionScore(len(probabilities), probabilities.shape[1], parts)
    score.add(probabilities, 0)
    return score.score()


class PrecisionRecall(NamedTuple):
    """What share of the generated images looks real, and what share of the real ones is covered."""

    precision: float
    recall: float


def precision_recall(
    real: Points, generated: Points, *, nearest: int = NEAREST, device: torch.device | None = None
) -> PrecisionRecall:
    """Compare two sets of features by their neighbourhoods, as in arXiv:1904.06991.

    Around each point of a set is a ball that reaches to its k-th nearest neighbour in the set.
    Precision is the share of generated points that lie in any real one's ball, recall that of real
    points in any generated one's. Distances are taken in blocks, in float64.

    Args:
        real: features of real images.
        generated: features of generated ones; both may be mapped from a file.
        nearest: k.
        device: where to compute; without it, on the CPU.

    Raises:
        ValueError: a set has no more points than `nearest`, or they have different features.
    """
    for name, points in (("real", real), ("generated", generated)):
        if len(points) <= nearest:
            raise ValueError(
                f"{name} has {len(points)} points, expected more than the {nearest} neighbours "
                "that are looked for"
            )
    if real.shape[1] != generated.shape[1]:
        raise ValueError(
            f"real has {real.shape[1]} features and generated {generated.shape[1]}, expected the "
            "same features"
        )
    middle = real[:ROWS].double().mean(dim=0)  # distances of what is near 0 round less
    sets = [_Points(points, middle, device or torch.device("cpu")) for points in (real, generated)]
    radii = [_radii(points, nearest) for points in sets]
    precision = _inside(sets[1], sets[0], radii[0]).double().mean().item()
    recall = _inside(sets[0], sets[1], radii[1]).double().mean().item()
    return PrecisionRecall(precision, recall)


class _Points:
    """Features, brought to the device block by block."""

    def __init__(self, points: Points, middle: Float64[Tensor, " F"], device: torch.device) -> None:
        self.points, self.middle, self.device = points, middle, device

    def __len__(self) -> int:
        return len(self.points)

    def blocks(self, size: int) -> Iterator[tuple[int, Float64[Tensor, "rows F"]]]:
        """Each block, and the place of its first row."""
        for start in range(0, len(self), size):
            block = self.points[start : start + size].double() - self.middle
            yield start, block.to(self.device)


def _radii(points: _Points, nearest: int) -> Radii:
    """Squared distance of each point to its k-th nearest other one."""
    radii = []
    for top, rows in points.blocks(ROWS):
        least = rows.new_full((len(rows), nearest), torch.inf)
        for left, columns in points.blocks(COLUMNS):
            squared = _squared_distances(rows, columns)
            own = torch.arange(top, top + len(rows)) - left
            here = ((own >= 0) & (own < len(columns))).nonzero().flatten()
            squared[here.to(rows.device), own[here].to(rows.device)] = torch.inf
            both = torch.cat([least, squared], dim=1)
            least = both.topk(nearest, dim=1, largest=False).values
        radii.append(least.amax(dim=1).cpu())
    return torch.cat(radii)


def _inside(points: _Points, centres: _Points, radii: Radii) -> Bool[Tensor, " points"]:
    """Whether each point lies in the ball of any centre."""
    found = []
    for _, rows in points.blocks(ROWS):
        inside = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for left, columns in centres.blocks(COLUMNS):
            reach = radii[left : left + len(columns)].to(rows.device)
            inside |= (_squared_distances(rows, columns) <= reach).any(dim=1)
        found.append(inside.cpu())
    return torch.cat(found)


def _squared_distances(
    rows: Float64[Tensor, "rows F"], columns: Float64[Tensor, "columns F"]
) -> Float64[Tensor, "rows columns"]:
    lengths = rows.square().sum(dim=1)[:, None] + columns.square().sum(dim=1)
    return torch.addmm(lengths, rows, columns.T, alpha=-2).clamp_(min=0)


def shuffled(total: int) -> Int[Tensor, " total"]:
    """The numbers below `total` in an order that is always the same, and in step with no other.

    >>> shuffled(4).sort().values.tolist()
    [0, 1, 2, 3]
    """
    return torch.from_numpy(_permutation(total))


@lru_cache(maxsize=4)
def _permutation(total: int) -> NDArray[np.int64]:
    """Return an array, because a tensor cached in inference mode could not be used elsewhere."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(0)).numpy()


def chosen_by_lot(places: Int[Tensor, " B"], total: int, wanted: int) -> Bool[Tensor, " B"]:
    """Whether each place is among the `wanted` of `total` that one lot has drawn.

    Not at equal strides: those would meet some of the classes alone where classes come in turn.

    >>> int(chosen_by_lot(torch.arange(7), 7, 3).sum())
    3
    """
    return shuffled(total)[places] < wanted
