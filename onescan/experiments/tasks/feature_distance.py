"""Compare images in the feature space of a trained classifier."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from onescan.experiments.tasks.teacher import load_teacher
from onescan.inputs import ImageFormat
from onescan.inputs.images import to_bytes, unit_pixels
from onescan.messages import named_type
from onescan.models.image_classifier import ImageClassifier
from onescan.shapes import Hidden, Images

FIELD = "task.classifier"
GRAY = (0.299, 0.587, 0.114)  # ITU-R 601, as in Pillow

Features = Float[Tensor, "_ F"]
Mean = Float64[Tensor, " F"]
Square = Float64[Tensor, "F F"]
Converted = Float[Tensor, "B _ _ _"]


class ClassifierOutput(NamedTuple):
    """What a classifier computes from images.

    Attributes:
        pooled: Features that the classification head reads, or both heads.
        tokens: Output of the last block.
        probabilities: Probability of each class.
    """

    pooled: Float[Tensor, "B F"]
    tokens: Hidden
    probabilities: Float[Tensor, "B classes"]


@torch.no_grad()
def extract_features(
    model: ImageClassifier, format: ImageFormat, images: Images
) -> ClassifierOutput:
    """Compute a classifier's features of images, in float32.

    Args:
        model: In evaluation mode, on the images' device.
        format: Format of the images that the classifier was trained on.
        images: Pixels from 0 to 1, in 1 or 3 channels and of any size.
    """
    with torch.autocast(images.device.type, enabled=False):  # the same under any precision
        fitted = convert_images(
            images.float(), channels=format.channels, height=format.height, width=format.width
        )
        tokens = model.forward_features(format.standardize(fitted))
        pooled = model.pooled(tokens)
        if model.config.distillation_token:  # the second head reads its own token
            pooled = torch.cat([pooled, tokens[:, 1]], dim=1)
        logits = model.forward_head(tokens)
    assert isinstance(logits, Tensor)  # a pair only in training
    return ClassifierOutput(pooled, tokens, logits.softmax(dim=1))


def convert_images(images: Images, *, channels: int, height: int, width: int) -> Converted:
    """Resize images, and convert between gray and color, where necessary.

    Raises:
        ValueError: If a conversion is necessary and the images have neither 1 nor 3 channels.
    """
    if images.shape[1] != channels:
        images = _convert_channels(images, channels)
    if images.shape[2:] == (height, width):
        return images
    resized = F.interpolate(images, (height, width), mode="bicubic", antialias=True)
    return resized.clamp(0, 1)  # bicubic interpolation overshoots at edges


def _convert_channels(images: Images, channels: int) -> Converted:
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    if images.shape[1] != len(GRAY):
        raise ValueError(f"images have {images.shape[1]} channels, expected 1 or 3")
    weights = images.new_tensor(GRAY)[:, None, None]
    return (images * weights).sum(dim=1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class SampleClassifier:
    """A trained classifier that evaluates generated images."""

    model: ImageClassifier
    format: ImageFormat

    def __call__(self, pixels: Images) -> ClassifierOutput:
        """Compute features of pixels from 0 to 1, rounded as in image files."""
        rounded = unit_pixels(to_bytes(pixels))
        return extract_features(self.model.to(pixels.device), self.format, rounded)


def load_sample_classifier(
    name: str, format: ImageFormat, class_names: tuple[str, ...]
) -> SampleClassifier:
    """Load the image classifier of a run, to evaluate images of the given format and classes.

    Raises:
        FileNotFoundError: If the path does not exist.
        ValueError: If it is not a run of an image classifier, or its classes or channels differ.
    """
    teacher = load_teacher(name, field=FIELD)
    teacher.check(format, class_names)
    if not isinstance(teacher.model, ImageClassifier):
        raise ValueError(
            f"{FIELD} is {name!r}, which holds {named_type(teacher.model)}, expected a run's "
            "ImageClassifier"
        )
    return SampleClassifier(model=teacher.model, format=teacher.format)


class Gaussian(NamedTuple):
    """Mean and covariance of features.

    Attributes:
        mean: Mean of each feature.
        covariance: Unbiased covariance matrix.
        samples: Number of images; None if unknown.
    """

    mean: Mean
    covariance: Square
    samples: int | None


class FeatureStatistics(nn.Module):
    """Count, mean and scatter matrix of features, accumulated over batches in float64.

    The buffers are the state, so `state_dict` saves it. Batches are merged by the pairwise update
    of Chan, Golub and LeVeque (1979), which stays accurate if the mean is large compared with the
    standard deviation: scatter matrices add up to S_a + S_b + d d^T n_a n_b / (n_a + n_b), where d
    is the difference of the means.

    >>> statistics = FeatureStatistics(1)
    >>> statistics.add(torch.tensor([[1.0], [2.0]]))
    >>> statistics.add(torch.tensor([[6.0]]))
    >>> statistics.mean.tolist(), statistics.gaussian().covariance.tolist()
    ([3.0], [[7.0]])
    """

    count: Int64[Tensor, ""]
    mean: Mean
    scatter: Square

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))
        self.register_buffer("scatter", torch.zeros(features, features, dtype=torch.float64))

    def add(self, features: Features) -> None:
        """Add a batch of features.

        Raises:
            ValueError: If a feature is NaN or infinite.
        """
        if not bool(torch.isfinite(features).all()):
            raise ValueError("features contain NaN or infinity, expected finite numbers")
        if not len(features):
            return
        batch = features.detach().cpu().double()
        mean = batch.mean(dim=0)
        centered, difference = batch - mean, mean - self.mean
        count, new = int(self.count), len(batch)
        self.scatter += centered.T @ centered
        self.scatter.addr_(difference, difference, alpha=count * new / (count + new))
        self.mean += difference * (new / (count + new))
        self.count += new

    def gaussian(self) -> Gaussian:
        """Return mean and covariance.

        Raises:
            ValueError: If there are fewer than two images.
        """
        count = int(self.count)
        if count <= 1:
            raise ValueError(f"there are features of {count} images, expected at least 2")
        return Gaussian(self.mean, self.scatter / (count - 1), count)


class Frechet(NamedTuple):
    """Fréchet distance between two sets of features.

    Attributes:
        distance: 0 if means and covariances are equal.
        is_singular: Whether a set has no more images than features. Its covariance is then
            singular, and the distance, though defined, depends strongly on the number of images.
    """

    distance: float
    is_singular: bool


def frechet_distance(a: Gaussian, b: Gaussian) -> Frechet:
    """Compute |m_a - m_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)), as in arXiv:1706.08500.

    The trace of the root equals that of the root of S_a^(1/2) S_b S_a^(1/2), which is symmetric and
    positive semidefinite. So two symmetric eigenvalue problems suffice, also for singular
    covariances.

    Raises:
        ValueError: If the numbers of features differ.

    >>> def normal(mean, variance):
    ...     mean, variance = (torch.tensor(x, dtype=torch.float64) for x in (mean, variance))
    ...     return Gaussian(mean, torch.diag(variance), None)
    >>> frechet_distance(normal([0.0, 0.0], [1.0, 4.0]), normal([3.0, 0.0], [9.0, 4.0])).distance
    13.0
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(
            f"the sets have {len(a.mean)} and {len(b.mean)} features, expected equal numbers"
        )
    values, vectors = torch.linalg.eigh(a.covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    product = root @ b.covariance @ root
    shared = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    difference = (a.mean - b.mean).square().sum()
    distance = difference + a.covariance.trace() + b.covariance.trace() - 2 * shared
    counts = [each.samples for each in (a, b) if each.samples is not None]
    return Frechet(max(distance.item(), 0.0), any(count <= len(a.mean) for count in counts))


def feature_distance(a: Features, b: Features) -> float:
    """Compute the Fréchet distance between two sets of features."""
    statistics = [FeatureStatistics(a.shape[1]) for _ in range(2)]
    for each, features in zip(statistics, (a, b), strict=True):
        each.add(features)
    return frechet_distance(statistics[0].gaussian(), statistics[1].gaussian()).distance
