"""Image classification: cross-entropy on augmented images, optionally with distillation."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onescan.checks import check_positive
from onescan.experiments.data import (
    AffineConfig,
    ArrayDataset,
    ArraySplits,
    AugmentConfig,
    Example,
    ImageSplits,
    MixConfig,
    derive_seed,
)
from onescan.experiments.data.image_dataset import MIN_CLASSES
from onescan.experiments.data.share import Share
from onescan.experiments.tasks.base import Batch, Evaluation, Metrics, Rows, Task, TaskConfig
from onescan.experiments.tasks.distillation import DistillationConfig
from onescan.inference.classification import _check_classifier
from onescan.inputs import (
    GridFormat,
)
from onescan.inputs.images import check_unit_range, unit_pixels
from onescan.shapes import Logits

TOP = 5
UNITS = {1: "signals", 2: "images"}  # what examples are called, by their number of axes
ROWS = 64  # arrays that are classified at once
MANY_CLASSES = 100  # from which the top-5 accuracy is reported


@dataclass(frozen=True, kw_only=True)
class ImageClassificationConfig(TaskConfig):
    """Image classification."""

    label_smoothing: float = 0.0
    """Label smoothing: share of each label spread over all classes, below 1."""
    augment: AugmentConfig | None = field(default_factory=AffineConfig)
    """Augmentation of training images."""
    mix: MixConfig | None = None
    """MixUp and CutMix of training images."""
    augment_repeats: int = 1
    """Repeated augmentation: differently augmented copies of each image in a batch."""
    teacher: str | None = None
    """Trained classifier to distill from: a run's folder, or a name that transformers can load."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """Distillation settings."""
    evaluation_batch_size: int = 256
    """Images per evaluation batch; affects memory, not results."""

    def build(self, data: ImageSplits | ArraySplits) -> "ImageClassification":
        """Build the task for a data set of images.

        Raises:
            ValueError: If a number is out of range, or distillation is set without a teacher.
        """
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"task.label_smoothing is {self.label_smoothing}, expected 0 to below 1"
            )
        for name in ("augment_repeats", "evaluation_batch_size"):
            check_positive(**{f"task.{name}": getattr(self, name)})
        if len(data.class_names) < MIN_CLASSES:
            raise ValueError("the data has one class, expected at least two")
        if self.teacher is None and self.distillation != DistillationConfig():
            raise ValueError("task.distillation is set, but task.teacher is None, expected one")
        if self.teacher is not None and not isinstance(data, ImageSplits):
            raise ValueError(
                f"task.teacher is {self.teacher!r}, expected None: the data are not images"
            )
        return ImageClassification(self, data)


class ImageClassification(Task):
    """Image classification on one data set."""

    unit = "images"

    def __init__(self, config: ImageClassificationConfig, data: ImageSplits | ArraySplits) -> None:
        self.config = config
        self.train, self.test = data.train, data.test
        self.format: GridFormat = data.format
        self.unit = UNITS.get(self.format.axes, "examples")
        self.class_names = data.class_names
        self.test_batch_size = config.evaluation_batch_size
        self.repeats = config.augment_repeats
        self.reads_share = False
        self.is_wide = isinstance(data.train, ArrayDataset) and data.train.dtype == np.float64
        self.augmentation = config.augment and config.augment.build()
        self.mixing = config.mix and config.mix.build()
        self.distillation = (
            config.distillation.build(config.teacher, data)
            if config.teacher is not None and isinstance(data, ImageSplits)
            else None
        )

    def shard(self, share: Share) -> None:
        """Shard images after augmentation; without augmentation, read only one shard of arrays."""
        self.share = share
        if isinstance(self.train, ArrayDataset) and isinstance(self.test, ArrayDataset):
            self.reads_share = not (self.augmentation or self.mixing or self.distillation)
            if self.reads_share:
                self.train, self.test = self.train.shared(share), self.test.shared(share)

    def prepare_training(self, device: torch.device) -> None:
        if self.distillation is not None:
            self.distillation.load(device)

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """Move a batch to the device; float64 is standardized before, and moved as float32."""
        images, *others = batch
        if self.is_wide and images.dtype == torch.float64:
            images = self.format.model_input(images)
        return super().to_device((images, *others), device)

    def augment(self, batch: Batch, seed: int) -> Batch:
        images, labels = unit_pixels(batch[0]), batch[1]
        if self.augmentation:
            images = self.augmentation(images, derive_seed(seed, "augment"))
        if self.mixing:
            targets = torch.nn.functional.one_hot(labels, len(self.class_names)).float()
            images, labels = self.mixing(images, targets, derive_seed(seed, "mix"))
        return images, labels

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        images, labels = batch
        logits, distilled = self._logits(model, images)
        loss = cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
        classes = labels.argmax(dim=1) if labels.is_floating_point() else labels
        metrics = {"accuracy": (logits.argmax(dim=1) == classes).float().mean()}
        if self.distillation is None:
            return loss, metrics
        loss, parts = self.distillation.loss(loss, distilled, images)
        return loss, metrics | parts

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        images, labels = batch
        logits = self._checked(model(self._model_input(images)), images)
        top = logits.topk(min(TOP, logits.shape[1]), dim=1).indices
        return {
            "labels": labels,
            "predictions": top[:, 0],
            "confidence": logits.softmax(dim=1).amax(dim=1),
            "losses": cross_entropy(logits, labels, reduction="none"),
            "in_top": (top == labels[:, None]).any(dim=1),
        }

    def evaluate(self, rows: Rows) -> Evaluation:
        metrics = {"accuracy": (rows["predictions"] == rows["labels"]).double().mean().item()}
        if len(self.class_names) >= MANY_CLASSES:
            metrics["top5_accuracy"] = rows["in_top"].double().mean().item()
        return Evaluation(metrics=metrics | {"loss": rows["losses"].mean().item()}, arrays=rows)

    def score(self, metrics: dict[str, float]) -> float:
        return metrics["accuracy"]

    def _logits(self, model: nn.Module, images: Tensor) -> tuple[Logits, Logits]:
        """Return logits to learn the labels with, and logits to distill with; often the same."""
        output = model(self._model_input(images))
        if isinstance(output, Tensor):
            logits = self._checked(output, images)
            return logits, logits
        if self.distillation is None:
            raise ValueError(
                "the model has a distillation token, but task.teacher is None, expected one"
            )
        logits, distilled = (self._checked(part, images) for part in output)
        return logits, distilled

    def _model_input(self, images: Tensor) -> Tensor:
        """Standardize this rank's shard of images, unless `to_device` has standardized them."""
        own = images if self.reads_share else self.share.cut(images, axis=2)
        is_standardized = self.is_wide and own.dtype != torch.float64
        return own if is_standardized else self.format.model_input(own)

    def _checked(self, scores: Tensor, images: Tensor) -> Logits:
        if scores.shape != (len(images), len(self.class_names)):
            raise ValueError(
                f"the model gives scores of shape {tuple(scores.shape)} for {len(images)} images "
                f"of {len(self.class_names)} classes; expected model.num_classes "
                f"{len(self.class_names)}"
            )
        return scores.float()


@torch.no_grad()
def classify_arrays(
    model: nn.Module, data: ArrayDataset, format: GridFormat
) -> Iterator[Float[Tensor, " classes"]]:
    """Yield the probability of each class for each example, in order.

    Args:
        model: Classifier in evaluation mode, as `load` returns it.
        data: Examples as `onescan.experiments.data.arrays.read_inputs` returns them.
        format: Format that the model was trained on, as `load` returns it.

    Raises:
        ValueError: If a value is not finite, or the model is not a classifier; or if it was trained
            on bytes, and the examples are not in the range of pixels.
    """
    _check_classifier(model)
    device = next(model.parameters()).device
    for first in range(0, len(data), ROWS):
        rows = [Example(row) for row in range(first, min(first + ROWS, len(data)))]
        stored = data.read(rows).batch[0]
        if format.reads_pixels:
            check_unit_range(unit_pixels(stored))
        values = format.model_input(stored).float().to(device)
        yield from model(values).softmax(dim=1).cpu()
