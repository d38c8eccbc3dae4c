"""Scores that accumulate over batches of images, can be saved, and resume.

torchmetrics is not used here but is the reference in the tests. Its InceptionScore keeps the
probabilities of all images and splits them with the global random generator. Its
FrechetInceptionDistance does not accept given means and covariances, and is about 20 times slower
for 1024 features, because it solves a nonsymmetric eigenvalue problem. It has no precision and
recall.
"""

from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64, UInt8
from torch import Tensor, nn

from onescan.checkpoint.files import damaged
from onescan.checkpoint.weights import read_weights, save_weights
from onescan.experiments.evaluation.features import FeatureBatch, FeatureExtractor
from onescan.experiments.evaluation.images import Source, round_to_bytes
from onescan.experiments.tasks.feature_distance import FeatureStatistics
from onescan.experiments.training.distributed import Interrupts
from onescan.inputs.images import to_bytes
from onescan.progress import progress_bar
from onescan.shapes import Images, Labels

SPLITS = 10  # of the images, for the Inception Score
NEIGHBORS = 3
ROWS, COLUMNS = 1024, 8192  # of a block of pairwise distances
FIRST = 100  # images that are kept to be shown
UNKNOWN = -1  # label
STATE = "state.safetensors"
SAVE_EVERY_S = 60.0

Probabilities = Float[Tensor, "B classes"]
Features = Float[Tensor, "_ _"]  # points, features
Radii = Float64[Tensor, " _"]


class MeanStd(NamedTuple):
    """Mean and standard deviation."""

    mean: float
    std: float


class InceptionScore(nn.Module):
    """exp E KL(p(y|x) || p(y)) over splits of the images, as in arXiv:1606.03498.

    p(y) is the mean of p(y|x) over a split. So the mean KL divergence is the mean of sum p log p
    minus the same of p(y), and sums over the images suffice. The buffers are the state.

    Args:
        classes: Number of classes.
        splits: Number of splits.
    """

    counts: Float64[Tensor, " splits"]
    sums: Float64[Tensor, "splits classes"]
    negative_entropies: Float64[Tensor, " splits"]

    def __init__(self, classes: int, splits: int = SPLITS) -> None:
        super().__init__()
        zeros = torch.zeros(splits, dtype=torch.float64)
        self.register_buffer("counts", zeros)
        self.register_buffer("sums", zeros.new_zeros(splits, classes))
        self.register_buffer("negative_entropies", zeros.clone())

    def add(self, probabilities: Probabilities, splits: Int[Tensor, " B"]) -> None:
        """Add a batch.

        Args:
            probabilities: Class probabilities of each image.
            splits: Index of each image's split.
        """
        p = probabilities.detach().cpu().double()
        self.counts.index_add_(0, splits, torch.ones(len(p), dtype=torch.float64))
        self.sums.index_add_(0, splits, p)
        self.negative_entropies.index_add_(0, splits, torch.xlogy(p, p).sum(dim=1))

    def score(self) -> MeanStd:
        """Return mean and standard deviation over the splits that have images."""
        counts = self.counts[self.counts > 0]
        means = self.sums[self.counts > 0] / counts[:, None]
        conditional = self.negative_entropies[self.counts > 0] / counts
        scores = (conditional - torch.xlogy(means, means).sum(dim=1)).exp()
        return MeanStd(scores.mean().item(), scores.std(correction=0).item())


class PrecisionRecall(NamedTuple):
    """Fraction of generated images that look real, and fraction of real images that are covered."""

    precision: float
    recall: float


def precision_recall(
    real: Features,
    generated: Features,
    *,
    neighbors: int = NEIGHBORS,
    device: torch.device | None = None,
) -> PrecisionRecall:
    """Compare two sets of features by their neighborhoods, as in arXiv:1904.06991.

    Each point is the center of a ball whose radius is the distance to its k-th nearest neighbor in
    the same set. Precision is the fraction of generated points inside the ball of any real point,
    recall the fraction of real points inside the ball of any generated point. Distances are
    computed in blocks, in float64.

    Args:
        real: Features of real images.
        generated: Features of generated images.
        neighbors: k.
        device: Device to compute on; by default the CPU.

    Raises:
        ValueError: If a set has no more than `neighbors` points, or the features differ.
    """
    for name, points in (("real", real), ("generated", generated)):
        if len(points) <= neighbors:
            raise ValueError(
                f"{name} has {len(points)} points, expected more than {neighbors} (neighbors)"
            )
    if real.shape[1] != generated.shape[1]:
        raise ValueError(
            f"real has {real.shape[1]} features and generated has {generated.shape[1]}, expected "
            "equal numbers"
        )
    center = real[:ROWS].double().mean(dim=0)  # centered points have smaller rounding errors
    sets = [_Points(points, center, device or torch.device("cpu")) for points in (real, generated)]
    real_points, generated_points = sets
    real_radii, generated_radii = (_radii(points, neighbors) for points in sets)
    precision = _is_inside(generated_points, real_points, real_radii).double().mean().item()
    recall = _is_inside(real_points, generated_points, generated_radii).double().mean().item()
    return PrecisionRecall(precision, recall)


class _Points:
    """Centered features, moved to the device in blocks."""

    def __init__(self, points: Features, center: Tensor, device: torch.device) -> None:
        self.points, self.center, self.device = points, center, device

    def blocks(self, size: int) -> Iterator[Float64[Tensor, "rows F"]]:
        for block in self.points.split(size):
            yield (block.double() - self.center).to(self.device)


def _radii(points: _Points, neighbors: int) -> Radii:
    """Return the distance of each point to its k-th nearest neighbor."""
    radii = []
    for rows in points.blocks(ROWS):
        nearest = rows.new_empty(len(rows), 0)
        for columns in points.blocks(COLUMNS):
            distances = torch.cat([nearest, torch.cdist(rows, columns)], dim=1)
            count = min(neighbors + 1, distances.shape[1])  # the nearest is the point itself
            nearest = distances.topk(count, dim=1, largest=False).values
        radii.append(nearest[:, -1].cpu())
    return torch.cat(radii)


def _is_inside(points: _Points, centers: _Points, radii: Radii) -> Bool[Tensor, " points"]:
    """Return whether each point is inside the ball of any center."""
    blocks = []
    for rows in points.blocks(ROWS):
        inside = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for columns, radius in zip(centers.blocks(COLUMNS), radii.split(COLUMNS), strict=True):
            inside |= (torch.cdist(rows, columns) <= radius.to(rows.device)).any(dim=1)
        blocks.append(inside.cpu())
    return torch.cat(blocks)


class Accumulator(nn.Module):
    """Sums over images in their order, features of some, and the first images.

    The buffers are the state, which is saved in a folder every minute.

    Args:
        source: The images.
        total: Number of images to read.
        features: Feature extractor.
        rows: Number of images whose features are kept for precision and recall, drawn at random.
        folder: Where the state is, or will be.

    Raises:
        ValueError: If the folder's state is damaged.
    """

    position: Int64[Tensor, ""]
    frequencies: Int64[Tensor, " classes"]
    confusion: Int64[Tensor, "requested predicted"]
    images: UInt8[Tensor, "shown 3 height width"]
    labels: Int64[Tensor, " shown"]
    rows: Float[Tensor, "rows features"]
    row_count: Int64[Tensor, ""]

    def __init__(
        self,
        source: Source,
        total: int,
        features: FeatureExtractor,
        rows: int,
        folder: Path,
    ) -> None:
        super().__init__()
        self.total, self.features, self.folder = total, features, folder
        # Random, because images may be sorted by class or alternate between classes.
        self.order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
        sizes, classes, shown = (
            features.sizes(source.size),
            len(source.class_names),
            min(FIRST, total),
        )
        self.pooled = FeatureStatistics(sizes.pooled)
        self.spatial = FeatureStatistics(sizes.spatial) if sizes.spatial else None
        self.inception = InceptionScore(sizes.classes) if sizes.classes else None
        confused = classes if sizes.classes == classes else 0
        zero = torch.tensor(0)
        self.register_buffer("position", zero)
        self.register_buffer("frequencies", zero.new_zeros(classes))
        self.register_buffer("confusion", zero.new_zeros(confused, confused))
        self.register_buffer("images", torch.zeros(shown, 3, *source.size, dtype=torch.uint8))
        self.register_buffer("labels", zero.new_full((shown,), UNKNOWN))
        self.register_buffer("rows", torch.zeros(min(rows, total), sizes.pooled))
        self.register_buffer("row_count", zero.clone())
        if (folder / STATE).exists():
            self._load()

    def _load(self) -> None:
        path = self.folder / STATE
        tensors, _ = read_weights(path, remedy(self.folder))
        try:
            self.load_state_dict(tensors)
        except RuntimeError as error:
            raise damaged(path, error, remedy(self.folder)) from error

    @property
    def is_done(self) -> bool:
        """Whether all images were read."""
        return int(self.position) == self.total

    @property
    def count(self) -> int:
        """Number of images added: less than `position` if some are unreadable."""
        return int(self.pooled.count)

    def read(self, source: Source, *, batch_size: int, name: str, progress: bool) -> None:
        """Add the remaining images.

        Args:
            source: The images.
            batch_size: Images per batch.
            name: Label of the progress bar.
            progress: Whether to show a progress bar on stderr.

        Raises:
            KeyboardInterrupt: If interrupted, after the state was saved.
            ValueError: If an image cannot be read, or pixels or features are not finite.
            OSError: If the state cannot be saved.
        """
        saved, is_hidden = monotonic(), not progress or self.is_done
        bar = progress_bar(self.total, unit=" images", desc=name, disable=is_hidden)
        bar.update(int(self.position))
        with bar, Interrupts("stopping after this batch; results are saved") as interrupts:
            while not self.is_done:
                start = int(self.position)
                stop = min(start + batch_size, self.total)
                images, labels = source.images(start, stop)
                if not bool(torch.isfinite(images).all()):
                    raise ValueError(
                        f"{source.name}: images {start} to {stop} contain NaN or infinity"
                    )
                if len(images):  # unreadable ones are left out
                    self.add(round_to_bytes(images), labels)
                self.position.fill_(stop)
                bar.update(stop - start)
                is_last = self.is_done or interrupts.requested
                if is_last or monotonic() - saved >= SAVE_EVERY_S:
                    save_weights(self.folder / STATE, self.state_dict(), {})
                    saved = monotonic()
                if interrupts.requested and not self.is_done:
                    raise KeyboardInterrupt

    def add(self, images: Images, labels: Labels | None) -> None:
        """Add a batch of images, pixels from 0 to 1 rounded to bytes.

        Raises:
            ValueError: If features are not finite, or a label is out of range.
        """
        features, start = self.features(images), self.count
        order = self.order[start : start + len(images)]
        self.pooled.add(features.pooled)
        if self.spatial is not None and features.spatial is not None:
            self.spatial.add(features.spatial)
        if self.inception is not None and features.probabilities is not None:
            splits = ((order + 1) * SPLITS - 1) // self.total
            self.inception.add(features.probabilities, splits)
        pooled_rows = features.pooled.cpu()[order < len(self.rows)]
        self.rows[int(self.row_count) :][: len(pooled_rows)] = pooled_rows
        self.row_count += len(pooled_rows)
        saved = max(0, min(len(images), len(self.images) - start))
        self.images[start : start + saved] = to_bytes(images[:saved])
        if labels is not None:
            self.labels[start : start + saved] = labels[:saved].cpu()
            if len(self.frequencies):
                self._add_labels(labels.cpu(), features)

    def _add_labels(self, labels: Labels, features: FeatureBatch) -> None:
        classes = len(self.frequencies)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise ValueError(
                f"labels are {labels.min()} to {labels.max()}, expected 0 to {classes - 1}"
            )
        self.frequencies += torch.bincount(labels, minlength=classes)
        if self.confusion.numel() and features.probabilities is not None:
            predicted = features.probabilities.argmax(dim=1).cpu()
            cells = torch.bincount(labels * classes + predicted, minlength=classes**2)
            self.confusion += cells.view(classes, classes)

    def label_accuracy(self) -> float | None:
        """Return the fraction of images classified as their label, or None without labels."""
        total = int(self.confusion.sum())
        return int(self.confusion.trace()) / total if total else None

    def kept_features(self) -> Features:
        """Return the features kept for precision and recall."""
        return self.rows[: int(self.row_count)]


def remedy(folder: Path) -> str:
    """Return the advice for a damaged state."""
    return f"remove {folder} to start again"
