"""Base classes of tasks on grids, and of those with a row of numbers per example."""

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from onescan.configs import ModelConfig
from onescan.experiments.data import (
    ArrayDataset,
    ArraySplits,
    AugmentConfig,
    ImageSplits,
    derive_seed,
)
from onescan.experiments.data.share import Share
from onescan.experiments.tasks.base import Batch, Metrics, Rows, Task, TaskConfig
from onescan.inputs import GridFormat
from onescan.inputs.images import unit_pixels
from onescan.inputs.targets import TargetKind
from onescan.messages import named_type, plural
from onescan.models.dense_predictor import DensePredictorConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.shapes import Logits

UNITS = {1: "signals", 2: "images"}  # what examples are called, by their number of axes
NOUNS: dict[TargetKind, str] = {
    "class": "class",
    "multilabel": "label",
    "value": "value",
    "class_map": "class",
    "value_map": "value",
}
READ_AS: dict[TargetKind, str] = {
    "class": "a class",
    "multilabel": "several labels",
    "value": "real values",
    "class_map": "a class at each position",
    "value_map": "real values at each position",
}
CONFIGS: dict[TargetKind, str] = {
    "class": "ImageClassificationConfig",
    "multilabel": "MultilabelClassificationConfig",
    "value": "RegressionConfig",
    "class_map": "SegmentationConfig",
    "value_map": "DenseRegressionConfig",
}


def check_target(config: TaskConfig, data: ImageSplits | ArraySplits, kind: TargetKind) -> None:
    """Raise ValueError if the data has targets of another kind than the task learns."""
    if (actual := data.target.kind) != kind:
        raise ValueError(
            f"task is {named_type(config)}, but the target of each example is {READ_AS[actual]}, "
            f"expected {CONFIGS[actual]}; data.target sets how y is read"
        )


class GridTask(Task):
    """A task on signals, images or volumes."""

    def __init__(
        self,
        data: ImageSplits | ArraySplits,
        *,
        augment: AugmentConfig | None,
        evaluation_batch_size: int,
    ) -> None:
        self.train, self.test = data.train, data.test
        self.format: GridFormat = data.format
        self.target = data.target
        self.unit = UNITS.get(self.format.axes, "examples")
        self.class_names = data.class_names
        self.test_batch_size = evaluation_batch_size
        self.reads_share = False
        self.is_float64 = isinstance(data.train, ArrayDataset) and data.train.dtype == np.float64
        self.augmentation = augment and augment.build()
        self.check_equal_sizes(augment=augment)

    def check_equal_sizes(self, **settings: Any) -> None:
        """Raise ValueError if a setting for examples of one size is set, but sizes differ."""
        for name, setting in settings.items():
            if setting is not None and self.format.is_ragged:
                raise ValueError(
                    f"task.{name} is {named_type(setting)}, but the examples have different sizes, "
                    "expected None"
                )

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError if examples have different sizes, and the model cannot read padding."""
        if not self.format.is_ragged:
            return
        if not isinstance(model, ImageClassifierConfig | DensePredictorConfig):
            return  # a model of the user, which may have an argument `keep`
        try:
            model.check_padding()
        except ValueError as error:
            raise ValueError(f"the examples have different sizes, but {error}") from error

    @property
    def reads_whole(self) -> bool:
        """Whether training needs whole examples even if sequences are split over processes."""
        return bool(self.augmentation)

    def shard(self, share: Share) -> None:
        """Shard images after augmentation; without augmentation, read only one shard of arrays."""
        self.share = share
        if isinstance(self.train, ArrayDataset) and isinstance(self.test, ArrayDataset):
            self.reads_share = not self.reads_whole
            if self.reads_share:
                self.train, self.test = self.train.shared(share), self.test.shared(share)

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """Move a batch to the device; float64 is standardized before, and moved as float32."""
        images, *others = batch
        if self.is_float64 and images.dtype == torch.float64:
            images = self._standardized(images)
        return super().to_device((images, *others), device)

    def augment(self, batch: Batch, seed: int) -> Batch:
        images, *others = unit_pixels(batch[0]), *batch[1:]
        if self.augmentation:
            images = self.augmentation(images, derive_seed(seed, "augment"))
        return images, *others

    def _standardized(self, images: Tensor) -> Tensor:
        """Return what `GridFormat.model_input` does; augmented images may be in any range."""
        return self.format.standardize(self.format.in_training_range(images))

    def _model_input(self, images: Tensor) -> Tensor:
        """Standardize this rank's shard of images, unless `to_device` has standardized them."""
        shard = images if self.reads_share else self.share.cut(images, axis=2)
        is_standardized = self.is_float64 and shard.dtype != torch.float64
        return shard if is_standardized else self._standardized(shard)

    def _apply(self, model: nn.Module, batch: Batch) -> Any:
        """Apply the model to a batch, with its mask if the examples have different sizes."""
        images, _, *masks = batch
        inputs = self._model_input(images)
        return model(inputs, keep=masks[0]) if masks else model(inputs)

    def _checked(self, scores: Tensor, images: Tensor) -> Logits:
        outputs = len(self.class_names)
        if scores.shape != (len(images), outputs):
            raise ValueError(
                f"the model gives scores of shape {tuple(scores.shape)} for {len(images)} images "
                f"of {plural(outputs, NOUNS[self.target.kind])}; expected model.num_classes "
                f"{outputs}"
            )
        return scores.float()


class RowTask(GridTask):
    """A grid task with a row of labels or values per example, each with its own loss."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        return self.losses(self._scores(model, batch), batch[1]).mean(), {}

    def count_labels(self, batch: Batch) -> int:
        return batch[1].numel()

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        scores = self._scores(model, batch)
        return {
            "labels": batch[1],
            "predictions": self.target.predictions(scores),
            "losses": self.losses(scores, batch[1]).mean(dim=1),
        }

    @abstractmethod
    def losses(
        self, scores: Logits, labels: Float[Tensor, "B classes"]
    ) -> Float[Tensor, "B classes"]:
        """Return the loss of each label or value of each example."""

    def _scores(self, model: nn.Module, batch: Batch) -> Logits:
        output = self._apply(model, batch)
        if not isinstance(output, Tensor):
            raise ValueError(
                "the model has a distillation token, which only image classification supports, "
                "expected model.distillation_token False"
            )
        return self._checked(output, batch[0])


def mean(numbers: Iterable[float]) -> float:
    """Return the mean of the numbers that are not NaN; 0 if there are none."""
    known = [number for number in numbers if not math.isnan(number)]
    return sum(known) / len(known) if known else 0.0
