"""Segmentation: predict one of several classes at each position of a grid."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from onescan.checks import check_choice
from onescan.experiments.data import ArraySplits, ImageSplits, batched
from onescan.experiments.data.array_maps import IGNORED
from onescan.experiments.tasks.base import Batch, Evaluation, Rows
from onescan.experiments.tasks.dense import DenseTask, DenseTaskConfig, PerExample, mean_loss
from onescan.experiments.tasks.grid import check_target, mean
from onescan.shapes import GridOutputs

MAX_LISTED = 10  # classes with metrics of their own; reports show all
SMOOTHING = 1e-5  # of the Dice loss, in positions

ClassMaps = Int[Tensor, "B *axes"]
Counts = Int[Tensor, "N classes"]


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig(DenseTaskConfig):
    """Segmentation with the cross-entropy over positions and a Dice loss over classes."""

    dice_weight: float = 1.0
    """Weight of the Dice loss, which is 1 minus the mean Dice score over the classes that occur in
    an example, computed from probabilities. 0 trains with the cross-entropy alone."""
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = "none"
    """Weight of each class in the cross-entropy: one number per class; or "balanced", which is
    inversely proportional to the number of its training positions."""

    def build(self, data: ImageSplits | ArraySplits) -> "Segmentation":
        """Build the task for a data set with a class at each position.

        Raises:
            ValueError: If a field is out of range, or the data has other targets.
        """
        check_target(self, data, "class_map")
        self.check_settings(data)
        if not (math.isfinite(self.dice_weight) and self.dice_weight >= 0):
            raise ValueError(f"task.dice_weight is {self.dice_weight}, expected 0 or more")
        if isinstance(self.class_weights, str):
            check_choice("task.class_weights", self.class_weights, ("none", "balanced"))
        elif len(self.class_weights) != len(data.class_names) or not all(
            math.isfinite(weight) and weight >= 0 for weight in self.class_weights
        ):
            raise ValueError(
                f"task.class_weights is {self.class_weights}, expected one number of at least 0 "
                f"for each of {len(data.class_names)} classes"
            )
        return Segmentation(self, data)


class Segmentation(DenseTask):
    """Segmentation on one data set."""

    def __init__(self, config: SegmentationConfig, data: ImageSplits | ArraySplits) -> None:
        super().__init__(data, config)
        self.config = config
        self.weights = _weights(config, data)

    def known(self, maps: ClassMaps) -> Bool[Tensor, "B *axes"]:
        return maps != IGNORED

    def losses(self, scores: GridOutputs, maps: ClassMaps) -> tuple[PerExample, Int[Tensor, " B"]]:
        counts = self.known(maps).flatten(1).sum(dim=1)
        weights = None if self.weights is None else self.weights.to(scores.device)
        entropy = cross_entropy(scores, maps, weights, ignore_index=IGNORED, reduction="none")
        losses = entropy.flatten(1).sum(dim=1) / counts.clamp(min=1)
        if self.config.dice_weight:
            losses = losses + self.config.dice_weight * dice_loss(scores, maps)
        return losses, counts

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        maps = batch[1]
        scores = self._predicted(model, batch)
        losses, counts = self.losses(scores, maps)
        known = self.known(maps).flatten(1)
        classes = scores.shape[1]
        true, predicted = maps.flatten(1), scores.argmax(dim=1).flatten(1)
        return {
            "correct": _count(true, known & (true == predicted), classes),
            "true": _count(true, known, classes),
            "predicted": _count(predicted, known, classes),
            "losses": losses,
            "positions": counts,
        }

    def evaluate(self, rows: Rows) -> Evaluation:
        loss = mean_loss(rows)
        scores = class_scores(rows)
        metrics = {
            "mean_iou": mean(score.iou for score in scores),
            "mean_dice": mean(score.dice for score in scores),
            "accuracy": (rows["correct"].sum() / rows["true"].sum()).item(),
        }
        if len(scores) <= MAX_LISTED:
            scores_by_class = zip(self.class_names, scores, strict=True)
            by_class = {
                f"{name}_iou": s.iou for name, s in scores_by_class if not math.isnan(s.iou)
            }
            metrics = metrics | by_class | metrics  # a class may be called "mean"
        return Evaluation(metrics=metrics | {"loss": loss}, arrays=rows)

    def score(self, metrics: dict[str, float]) -> float:
        return metrics["mean_iou"]


@dataclass(frozen=True, kw_only=True)
class ClassScore:
    """How well one class is segmented, over all positions of all examples."""

    positions: int
    """Number of positions of the class."""
    iou: float
    """Intersection over union of the predicted and the true positions; NaN if there are none."""
    dice: float
    """Dice score, which is F1 over positions; NaN if the class is neither true nor predicted."""
    precision: float
    recall: float


def class_scores(rows: Rows) -> list[ClassScore]:
    """Compute the scores of each class from the counts of `Segmentation.predict`."""
    columns = (rows[name].sum(dim=0).tolist() for name in ("correct", "true", "predicted"))
    return [
        ClassScore(
            positions=true,
            iou=correct / (true + predicted - correct) if true + predicted else math.nan,
            dice=2 * correct / (true + predicted) if true + predicted else math.nan,
            precision=correct / predicted if predicted else math.nan,
            recall=correct / true if true else math.nan,
        )
        for correct, true, predicted in zip(*columns, strict=True)
    ]


def dice_loss(scores: GridOutputs, maps: ClassMaps) -> PerExample:
    """Return 1 minus the mean Dice score over the classes of each example, from probabilities.

    The Dice score of class c is 2 sum(p_c y_c) / (sum(p_c) + sum(y_c)), with sums over the
    positions that have a class; p_c is the probability of c, and y_c is 1 where c is true.

    Args:
        scores: Logits.
        maps: Classes; positions of class -100 are left out.
    """
    has_class = (maps != IGNORED).unsqueeze(1)
    true = one_hot(maps.clamp(min=0), scores.shape[1]).movedim(-1, 1) * has_class
    probabilities = scores.softmax(dim=1) * has_class
    overlap, predicted, actual = (
        x.flatten(2).sum(dim=2) for x in (probabilities * true, probabilities, true)
    )
    dice = (2 * overlap + SMOOTHING) / (predicted + actual + SMOOTHING)
    occurs = actual > 0
    return 1 - (dice * occurs).sum(dim=1) / occurs.sum(dim=1).clamp(min=1)


def _count(
    classes: Int[Tensor, "B positions"], is_counted: Bool[Tensor, "B positions"], count: int
) -> Counts:
    """Count the chosen positions of each class."""
    totals = classes.new_zeros(len(classes), count)
    return totals.scatter_add_(1, classes.clamp(min=0), is_counted.long())


def _weights(
    config: SegmentationConfig, data: ImageSplits | ArraySplits
) -> Float[Tensor, " classes"] | None:
    """Return the weight of each class, with a mean of 1 over the training positions."""
    if config.class_weights == "none":
        return None
    counts = torch.zeros(len(data.class_names), dtype=torch.float64)
    for group in batched(data.train.examples(seed=None), config.evaluation_batch_size):
        maps = data.train.read([example for example, _ in group]).batch[1]
        counts += maps[maps != IGNORED].bincount(minlength=len(counts))
    weights = (
        torch.where(counts > 0, 1 / counts.clamp(min=1), 0.0)
        if config.class_weights == "balanced"
        else torch.tensor(config.class_weights, dtype=torch.float64)
    )
    total = (weights * counts).sum()
    if not total > 0:
        raise ValueError(
            f"task.class_weights is {config.class_weights}, which is 0 for all classes that occur"
        )
    return (weights * counts.sum() / total).float()
