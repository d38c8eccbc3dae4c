"""What a trained classifier makes of images: features to compare them by, and classes."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from onescan.data import ImageFormat
from onescan.data.images import to_bytes, unit_pixels
from onescan.models.image_classifier import ImageClassifier
from onescan.shapes import Hidden, Images
from onescan.tasks.teacher import load_teacher

FIELD = "task.classifier"
GREY = (0.299, 0.587, 0.114)  # ITU-R 601, as pillow has it

Fitted = Float[Tensor, "B _ _ _"]


class Seen(NamedTuple):
    """What a classifier makes of images.

    Attributes:
        pooled: what its head reads, or its heads.
        tokens: what that is made of.
        probabilities: of its classes.
    """

    pooled: Float[Tensor, "B F"]
    tokens: Hidden
    probabilities: Float[Tensor, "B classes"]


@torch.no_grad()
def look(model: ImageClassifier, format: ImageFormat, images: Images) -> Seen:
    """Look at images, of 3 channels or 1 and of any size, as the classifier was trained to.

    Args:
        model: in evaluation mode, on the images' device.
        format: what it was trained on.
        images: from 0 to 1, in 256 steps as those that it learnt from.
    """
    with torch.autocast(images.device.type, enabled=False):  # one judge for all precisions
        shown = fitted(
            images.float(), channels=format.channels, height=format.height, width=format.width
        )
        tokens = model.forward_features(format.standardize(shown))
        pooled = model.pooled(tokens)
        if model.config.distillation_token:  # a head reads that too
            pooled = torch.cat([pooled, tokens[:, 1]], dim=1)
        scores = model.forward_head(tokens)
    assert isinstance(scores, Tensor)  # two in training alone
    return Seen(pooled, tokens, scores.softmax(dim=1))


def fitted(images: Images, *, channels: int, height: int, width: int) -> Fitted:
    """Resize images, and make grey ones of colour or colour ones of grey, as needed.

    Raises:
        ValueError: they are neither grey nor of 3 channels, and others are needed.
    """
    if images.shape[1] != channels:
        images = _recoloured(images, channels)
    if images.shape[2:] == (height, width):
        return images
    resized = F.interpolate(images, (height, width), mode="bicubic", antialias=True)
    return resized.clamp(0, 1)  # it overshoots at edges


@dataclass(frozen=True, kw_only=True)
class SampleJudge:
    """A run's classifier that judges what a denoiser makes."""

    model: ImageClassifier
    format: ImageFormat

    def __call__(self, pixels: Images) -> Seen:
        """Look at images, pixels from 0 to 1."""
        rounded = unit_pixels(to_bytes(pixels))
        return look(self.model.to(pixels.device), self.format, rounded)


def load_judge(name: str, format: ImageFormat, class_names: tuple[str, ...]) -> SampleJudge:
    """Load a run's classifier to judge images of this format and these classes.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: it is no run's image classifier, or one of other classes or channels.
    """
    found = load_teacher(name, field=FIELD)
    found.check(format, class_names)
    if not isinstance(found.model, ImageClassifier):
        raise ValueError(
            f"{FIELD} is {name!r}, which holds a {type(found.model).__name__}, expected a run's "
            "ImageClassifier"
        )
    return SampleJudge(model=found.model, format=found.format)


def _recoloured(images: Images, channels: int) -> Fitted:
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    if images.shape[1] != len(GREY):
        raise ValueError(f"images have {images.shape[1]} channels, expected 3, or 1 for grey")
    weights = images.new_tensor(GREY)[:, None, None]
    return (images * weights).sum(dim=1, keepdim=True)
