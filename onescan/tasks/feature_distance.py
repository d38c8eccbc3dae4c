"""Means and covariances of features, gathered batch by batch, and how far two of them lie apart."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

Mean = Float64[Tensor, " F"]
Square = Float64[Tensor, "F F"]


class Gaussian(NamedTuple):
    """What a set of features is compared by.

    Attributes:
        mean: of each feature.
        covariance: of each pair, unbiased.
        samples: how many it is of; None where that is not known.
    """

    mean: Mean
    covariance: Square
    samples: int | None


class Frechet(NamedTuple):
    """How far two sets of features lie apart.

    Attributes:
        distance: 0 where mean and covariance are the same.
        is_singular: whether a set has no more samples than features. Its covariance then knows
            nothing of some directions, and the distance, still defined, depends much on how many
            samples there are.
    """

    distance: float
    is_singular: bool


class FeatureStatistics:
    """Count, mean and scatter of features, in float64: what `add` has seen, in whatever batches.

    Source: the pairwise update of Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances" (1979): with d the difference of two means, scatters
    add up to S_a + S_b + d d^T n_a n_b / (n_a + n_b).

    >>> statistics = FeatureStatistics.empty(1)
    >>> statistics.add(torch.tensor([[1.0], [2.0]]))
    >>> statistics.add(torch.tensor([[6.0]]))
    >>> statistics.mean.tolist(), statistics.gaussian().covariance.tolist()
    ([3.0], [[7.0]])
    """

    def __init__(self, count: int, mean: Mean, scatter: Square) -> None:
        self.count, self.mean, self.scatter = count, mean, scatter

    @classmethod
    def empty(cls, features: int) -> "FeatureStatistics":
        """Begin, with so many features."""
        zeros = torch.zeros(features, dtype=torch.float64)
        return cls(0, zeros, zeros.new_zeros(features, features))

    def add(self, features: Float[Tensor, "B F"]) -> None:
        """Take note of more samples.

        Raises:
            ValueError: a feature is NaN or infinite, as of images that are.
        """
        if not bool(torch.isfinite(features).all()):
            raise ValueError("features hold NaN or infinity, expected finite numbers")
        if not len(features):
            return
        numbers = features.detach().cpu().double()
        mean = numbers.mean(dim=0)
        apart = numbers - mean
        self.merge(FeatureStatistics(len(numbers), mean, apart.T @ apart))

    def merge(self, other: "FeatureStatistics") -> None:
        """Take note of what another has seen."""
        count = self.count + other.count
        if not other.count:
            return
        apart = other.mean - self.mean
        self.scatter += other.scatter
        self.scatter.addr_(apart, apart, alpha=self.count * other.count / count)
        self.mean += apart * (other.count / count)
        self.count = count

    def gaussian(self) -> Gaussian:
        """What was seen, as mean and covariance.

        Raises:
            ValueError: there are fewer than two samples, of which there is no covariance.
        """
        if self.count <= 1:
            raise ValueError(f"there are features of {self.count} images, expected 2 at least")
        return Gaussian(self.mean, self.scatter / (self.count - 1), self.count)


def frechet_distance(a: Gaussian, b: Gaussian) -> Frechet:
    """Measure |m_a - m_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)), as in arXiv:1706.08500.

    The trace of the root is that of the root of S_a^(1/2) S_b S_a^(1/2), which is symmetric and
    has no negative eigenvalues, so nothing becomes complex, whatever is singular.

    Raises:
        ValueError: the two are of different features.

    >>> def normal(mean, variance):
    ...     mean, variance = (torch.tensor(x, dtype=torch.float64) for x in (mean, variance))
    ...     return Gaussian(mean, torch.diag(variance), None)
    >>> frechet_distance(normal([0.0, 0.0], [1.0, 4.0]), normal([3.0, 0.0], [9.0, 4.0])).distance
    13.0
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(
            f"statistics of {len(a.mean)} features are compared with some of {len(b.mean)}, "
            "expected the same features"
        )
    root = _square_root(a.covariance)
    product = root @ b.covariance @ root
    shared = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    apart = (a.mean - b.mean).square().sum()
    distance = apart + a.covariance.trace() + b.covariance.trace() - 2 * shared
    counts = [each.samples for each in (a, b) if each.samples is not None]
    return Frechet(max(distance.item(), 0.0), any(count <= len(a.mean) for count in counts))


def feature_distance(a: Float[Tensor, "A F"], b: Float[Tensor, "B F"]) -> float:
    """How far two sets of features lie apart, all at once; see `frechet_distance`."""
    gathered = [FeatureStatistics.empty(a.shape[1]) for _ in range(2)]
    for statistics, features in zip(gathered, (a, b), strict=True):
        statistics.add(features)
    return frechet_distance(*(statistics.gaussian() for statistics in gathered)).distance


def _square_root(covariance: Square) -> Square:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
