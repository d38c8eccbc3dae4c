"""What is kept of images that were looked at: sums over all, and the first few themselves."""

from typing import NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from onescan.data.images import to_bytes
from onescan.evaluation.generation.features import FeatureBatch
from onescan.evaluation.generation.scores import InceptionScore
from onescan.shapes import Images, Labels
from onescan.tasks.feature_distance import FeatureStatistics

FIRST = 100
UNKNOWN = -1  # a label

Confusion = Int64[Tensor, "asked told"]


class Shown(NamedTuple):
    """Images to look at.

    Attributes:
        images: as bytes.
        labels: the classes that were asked for; -1 where none was.
    """

    images: UInt8[Tensor, "B channels height width"]
    labels: Int64[Tensor, " B"]


def class_by_class(shown: Shown) -> Shown:
    """Put images of a class beside each other, else in the order they have."""
    order = shown.labels.argsort(stable=True)
    return Shown(shown.images[order], shown.labels[order])


class Tally:
    """Sums over images, in their order; `tensors` and `restore` keep it on disk."""

    def __init__(self, total: int, num_classes: int) -> None:
        self.total = total
        """Images that will be looked at, for the parts of the Inception Score."""
        self.place = 0
        """Where to go on."""
        self.pooled: FeatureStatistics | None = None
        self.spatial: FeatureStatistics | None = None
        self.score: InceptionScore | None = None
        self.confusion: Confusion | None = None
        """How often images of a class, or asked to be of it, are told to be of which."""
        self.frequencies = torch.zeros(num_classes, dtype=torch.int64)
        """Images of each class."""
        self.first: Shown | None = None

    @property
    def count(self) -> int:
        """Images that were looked at, fewer than `place` where some cannot be read."""
        return self.pooled.count if self.pooled else 0

    def add(self, images: Images, labels: Labels | None, found: FeatureBatch) -> None:
        """Take note of images in 256 steps from 0 to 1.

        Raises:
            ValueError: features are not finite, or a label is of no class.
        """
        start = self.count
        self.pooled = _added(self.pooled, found.pooled)
        if found.spatial is not None:
            self.spatial = _added(self.spatial, found.spatial)
        if found.probabilities is not None:
            classes = found.probabilities.shape[1]
            self.score = self.score or InceptionScore(self.total, classes)
            self.score.add(found.probabilities, start)
        if labels is not None and len(self.frequencies):
            self._add_labels(labels, found)
        self._keep_first(images, labels)

    def _add_labels(self, labels: Labels, found: FeatureBatch) -> None:
        classes = len(self.frequencies)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise ValueError(
                f"labels are {labels.min()} to {labels.max()}, expected 0 to {classes - 1}"
            )
        self.frequencies += torch.bincount(labels.cpu(), minlength=classes)
        if found.probabilities is None or found.probabilities.shape[1] != classes:
            return
        if self.confusion is None:
            self.confusion = torch.zeros(classes, classes, dtype=torch.int64)
        told = found.probabilities.argmax(dim=1).cpu()
        cells = torch.bincount(labels.cpu() * classes + told, minlength=classes**2)
        self.confusion += cells.view(classes, classes)

    def _keep_first(self, images: Images, labels: Labels | None) -> None:
        missing = FIRST - (len(self.first.images) if self.first else 0)
        if missing <= 0 or not len(images):
            return
        shown = to_bytes(images[:missing]).cpu()
        asked = torch.full((len(shown),), UNKNOWN) if labels is None else labels[:missing].cpu()
        before = self.first or Shown(shown[:0], asked[:0])
        self.first = Shown(torch.cat([before.images, shown]), torch.cat([before.labels, asked]))

    def share_as_asked(self) -> float | None:
        """Of the images, the share whose told class is the one asked for; None if none was."""
        if self.confusion is None or not self.confusion.sum():
            return None
        return int(self.confusion.trace()) / int(self.confusion.sum())

    def tensors(self) -> dict[str, Tensor]:
        """All of it, to be written to a file."""
        kept: dict[str, Tensor] = {
            "place": torch.tensor([self.place, self.total]),
            "frequencies": self.frequencies,
        }
        for name, statistics in (("pooled", self.pooled), ("spatial", self.spatial)):
            if statistics is not None:
                kept[f"{name}.count"] = torch.tensor(statistics.count)
                kept[f"{name}.mean"] = statistics.mean
                kept[f"{name}.scatter"] = statistics.scatter
        if self.score is not None:
            kept["score.counts"] = self.score.counts
            kept["score.sums"] = self.score.sums
            kept["score.negative_entropies"] = self.score.negative_entropies
        if self.confusion is not None:
            kept["confusion"] = self.confusion
        if self.first is not None:
            kept |= {"first.images": self.first.images, "first.labels": self.first.labels}
        return kept

    @classmethod
    def restore(cls, kept: dict[str, Tensor]) -> "Tally":
        """Bring back what `tensors` gave.

        Raises:
            KeyError: something is missing.
        """
        place, total = kept["place"].tolist()
        tally = cls(total, 0)
        tally.place, tally.frequencies = place, kept["frequencies"]
        tally.pooled, tally.spatial = _restored(kept, "pooled"), _restored(kept, "spatial")
        if "score.sums" in kept:
            parts, classes = kept["score.sums"].shape
            tally.score = InceptionScore(total, classes, parts)
            tally.score.counts, tally.score.sums = kept["score.counts"], kept["score.sums"]
            tally.score.negative_entropies = kept["score.negative_entropies"]
        tally.confusion = kept.get("confusion")
        if "first.images" in kept:
            tally.first = Shown(kept["first.images"], kept["first.labels"])
        return tally


def _added(statistics: FeatureStatistics | None, features: Tensor) -> FeatureStatistics:
    statistics = statistics or FeatureStatistics.empty(features.shape[1])
    statistics.add(features)
    return statistics


def _restored(kept: dict[str, Tensor], name: str) -> FeatureStatistics | None:
    if f"{name}.count" not in kept:
        return None
    count = int(kept[f"{name}.count"])
    return FeatureStatistics(count, kept[f"{name}.mean"], kept[f"{name}.scatter"])
