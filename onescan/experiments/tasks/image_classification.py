"""Image classification: cross-entropy on augmented images, optionally with distillation."""

from collections.abc import Iterator
from dataclasses import dataclass, field

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
from onescan.experiments.tasks.base import Batch, Evaluation, Metrics, Rows, TaskConfig
from onescan.experiments.tasks.distillation import DistillationConfig
from onescan.experiments.tasks.grid import GridTask, check_target
from onescan.inputs import GridFormat
from onescan.shapes import GridKeep, Grids, Logits

TOP = 5
ROWS = 64  # arrays that are read at once
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
            ValueError: If a number is out of range, distillation is set without a teacher, or the
                data has labels or values instead of classes.
        """
        check_target(self, data, "class")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"task.label_smoothing is {self.label_smoothing}, expected 0 to below 1"
            )
        for name in ("augment_repeats", "evaluation_batch_size"):
            check_positive(**{f"task.{name}": getattr(self, name)})
        if len(data.class_names) < MIN_CLASSES:
            raise ValueError("the data has one class, expected at least two")
        if self.teacher is None and self.distillation != DistillationConfig():
            raise ValueError(
                "task.distillation is set, but task.teacher is None, expected a teacher"
            )
        if self.teacher is not None and not isinstance(data, ImageSplits):
            raise ValueError(
                f"task.teacher is {self.teacher!r}, expected None, because the data are not images"
            )
        return ImageClassification(self, data)


class ImageClassification(GridTask):
    """Image classification on one data set."""

    def __init__(self, config: ImageClassificationConfig, data: ImageSplits | ArraySplits) -> None:
        super().__init__(
            data,
            augment=config.augment,
            evaluation_batch_size=config.evaluation_batch_size,
        )
        self.config = config
        self.repeats = config.augment_repeats
        self.mixing = config.mix and config.mix.build()
        self.check_equal_sizes(mix=config.mix)
        self.distillation = (
            config.distillation.build(config.teacher, data)
            if config.teacher is not None and isinstance(data, ImageSplits)
            else None
        )

    @property
    def reads_whole(self) -> bool:
        return bool(self.augmentation or self.mixing or self.distillation)

    def prepare_training(self, device: torch.device) -> None:
        if self.distillation is not None:
            self.distillation.load(device)

    def augment(self, batch: Batch, seed: int) -> Batch:
        images, labels, *masks = super().augment(batch, seed)
        if self.mixing:
            targets = torch.nn.functional.one_hot(labels, len(self.class_names)).float()
            images, labels = self.mixing(images, targets, derive_seed(seed, "mix"))
        return images, labels, *masks

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        images, labels = batch[:2]
        logits, distilled = self._logits(model, batch)
        loss = cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
        classes = labels.argmax(dim=1) if labels.is_floating_point() else labels
        metrics = {"accuracy": (logits.argmax(dim=1) == classes).float().mean()}
        if self.distillation is None:
            return loss, metrics
        loss, parts = self.distillation.loss(loss, distilled, images)
        return loss, metrics | parts

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        images, labels = batch[:2]
        logits = self._checked(self._apply(model, batch), images)
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

    def _logits(self, model: nn.Module, batch: Batch) -> tuple[Logits, Logits]:
        """Return logits to learn the labels with, and logits to distill with; often the same."""
        output, images = self._apply(model, batch), batch[0]
        if isinstance(output, Tensor):
            logits = self._checked(output, images)
            return logits, logits
        if self.distillation is None:
            raise ValueError(
                "the model has a distillation token, but task.teacher is None, expected a teacher"
            )
        logits, distilled = (self._checked(part, images) for part in output)
        return logits, distilled


def read_arrays(data: ArrayDataset, format: GridFormat) -> Iterator[tuple[Grids, GridKeep | None]]:
    """Yield batches of examples as a model's input, and masks of those of different sizes.

    Raises:
        ValueError: If a value is not finite; or if the model was trained on bytes, and the examples
            are not in the range of pixels.
    """
    for first in range(0, len(data), ROWS):
        rows = [Example(row) for row in range(first, min(first + ROWS, len(data)))]
        stored, _, *masks = data.read(rows).batch
        yield format.model_input(stored).float(), masks[0] if masks else None
