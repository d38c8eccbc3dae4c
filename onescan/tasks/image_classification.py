"""Telling what an image shows: cross-entropy on augmented images, judged on held-out ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onescan.checks import check_positive
from onescan.data import (
    AffineConfig,
    Format,
    ImageFormat,
    ImageSplits,
    derive_seed,
    epoch_order,
    read_image,
)
from onescan.shapes import Images, Labels, Logits
from onescan.tasks.base import Batch, Evaluation, Metrics, Task, TaskConfig


@dataclass(frozen=True, kw_only=True)
class ImageClassificationConfig(TaskConfig):
    """Image classification."""

    label_smoothing: float = 0.0
    """Part of every label that is spread over all classes, below 1."""
    augment: AffineConfig | None = field(default_factory=AffineConfig)
    """Random changes of the training images."""
    evaluation_batch_size: int = 256
    """Images at once when evaluating; changes the memory, not the result."""

    def build(self, data: ImageSplits) -> "ImageClassification":
        """Pose the problem on these images.

        Raises:
            ValueError: label_smoothing is not in [0, 1), or the batch size not above 0.
        """
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"task.label_smoothing is {self.label_smoothing}, expected 0 to below 1"
            )
        check_positive(**{"task.evaluation_batch_size": self.evaluation_batch_size})
        return ImageClassification(self, data)


class ImageClassification(Task):
    """Image classification on one data set."""

    unit = "images"

    def __init__(self, config: ImageClassificationConfig, data: ImageSplits) -> None:
        self.config = config
        self.data = data
        self.format = data.format
        self.class_names = data.class_names
        self.augment = config.augment and config.augment.build(data.format)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Count whole batches; what is left over is in another epoch's batches.

        Raises:
            ValueError: there are fewer images than one batch needs.
        """
        images = len(self.data.train)
        if batch_size > images:
            raise ValueError(f"training.batch_size is {batch_size}, but there are {images} images")
        return images // batch_size

    def batch(self, *, epoch: int, index: int, batch_size: int, seed: int) -> Batch:
        order = epoch_order(len(self.data.train), seed=seed, epoch=epoch)
        here = order[index * batch_size : (index + 1) * batch_size]
        images, labels = self.data.train.batch(here)
        if self.augment:
            generator = torch.Generator().manual_seed(derive_seed(seed, "augment", epoch, index))
            images = self.augment(images, generator)
        return images, labels

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        images, labels = batch
        logits = self._scores(model, images)
        loss = cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
        return loss, {"accuracy": (logits.argmax(dim=1) == labels).float().mean()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Evaluation:
        was_training = model.training
        model.eval()
        device, size = next(model.parameters()).device, self.config.evaluation_batch_size
        scores, labels = [], []
        for start in range(0, len(self.data.test), size):
            images, known = self.data.test.batch(slice(start, start + size))
            scores.append(self._scores(model, images.to(device)).cpu())
            labels.append(known)
        model.train(was_training)
        return _judge(torch.cat(scores), torch.cat(labels))

    def _scores(self, model: nn.Module, images: Images) -> Logits:
        logits: Tensor = model(images).float()
        if logits.shape != (len(images), len(self.class_names)):
            raise ValueError(
                f"the model gives scores of shape {tuple(logits.shape)} for {len(images)} images "
                f"of {len(self.class_names)} classes: is model.num_classes right?"
            )
        return logits


@torch.no_grad()
def classify(
    model: nn.Module, paths: Sequence[str | Path], format: Format
) -> Float[Tensor, "images classes"]:
    """Read image files and return each one's probability of each class.

    Args:
        model: a classifier in evaluation mode, as `load` returns it.
        paths: image files of any kind and size.
        format: what the model was trained on, as `load` returns it.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file is not a whole image, or the model does not read images.
    """
    if not isinstance(format, ImageFormat):
        raise ValueError(f"the model reads {type(format).__name__}, not images")
    device = next(model.parameters()).device
    images = [read_image(path, format) for path in paths]
    return torch.cat([model(image[None].to(device)).softmax(dim=1).cpu() for image in images])


def _judge(logits: Logits, labels: Labels) -> Evaluation:
    predictions = logits.argmax(dim=1)
    return Evaluation(
        metrics={
            "accuracy": (predictions == labels).float().mean().item(),
            "loss": cross_entropy(logits, labels).item(),
        },
        arrays={
            "probabilities": logits.softmax(dim=1),
            "predictions": predictions,
            "labels": labels,
        },
    )
