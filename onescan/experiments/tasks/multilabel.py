"""Multi-label classification: whether each of several labels applies to an example."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from onescan.checks import check_choice, check_positive
from onescan.experiments.data import ArrayDataset, ArraySplits, AugmentConfig, ImageSplits
from onescan.experiments.tasks.base import Evaluation, Rows, TaskConfig
from onescan.experiments.tasks.grid import RowTask, check_target, mean
from onescan.shapes import Logits

THRESHOLD = 0.5  # probability above which a label is predicted

PositiveWeight = Literal["none", "balanced"]
Table = Shaped[Tensor, "N labels"]


@dataclass(frozen=True, kw_only=True)
class MultilabelClassificationConfig(TaskConfig):
    """Multi-label classification with binary cross-entropy."""

    positive_weight: PositiveWeight = "none"
    """Weight of positive examples in the loss of each label: "balanced" is the number of training
    examples without the label, divided by the number with it."""
    augment: AugmentConfig | None = None
    """Augmentation of training images."""
    evaluation_batch_size: int = 256
    """Images per evaluation batch; affects memory, not results."""

    def build(self, data: ImageSplits | ArraySplits) -> "MultilabelClassification":
        """Build the task for a data set with several labels per example.

        Raises:
            ValueError: If a field is out of range, or the data has classes or values.
        """
        check_target(self, data, "multilabel")
        check_choice("task.positive_weight", self.positive_weight, get_args(PositiveWeight))
        check_positive(**{"task.evaluation_batch_size": self.evaluation_batch_size})
        return MultilabelClassification(self, data)


class MultilabelClassification(RowTask):
    """Multi-label classification on one data set."""

    def __init__(
        self, config: MultilabelClassificationConfig, data: ImageSplits | ArraySplits
    ) -> None:
        super().__init__(
            data,
            augment=config.augment,
            evaluation_batch_size=config.evaluation_batch_size,
        )
        self.config = config
        self.positive_weight: Float[Tensor, " labels"] | None = None
        if config.positive_weight == "balanced":
            assert isinstance(data.train, ArrayDataset)
            labels = data.train.labels[data.train.indices]
            support = labels.sum(dim=0)
            weight = torch.where(support > 0, (len(labels) - support) / support.clamp(min=1), 1.0)
            self.positive_weight = weight.float()

    def losses(
        self, scores: Logits, labels: Float[Tensor, "B classes"]
    ) -> Float[Tensor, "B classes"]:
        weight = self.positive_weight
        return binary_cross_entropy_with_logits(
            scores,
            labels.to(scores.dtype),
            reduction="none",
            pos_weight=None if weight is None else weight.to(scores.device),
        )

    def evaluate(self, rows: Rows) -> Evaluation:
        by_label, total = label_scores(rows["labels"], rows["predictions"])
        metrics = {
            "mean_average_precision": mean(label.average_precision for label in by_label),
            "macro_f1": mean(label.f1 for label in by_label),
            "micro_f1": total.f1,
            "loss": rows["losses"].mean().item(),
        }
        return Evaluation(metrics=metrics, arrays=rows)

    def score(self, metrics: dict[str, float]) -> float:
        return metrics["mean_average_precision"]


@dataclass(frozen=True, kw_only=True)
class LabelScore:
    """How well one label is predicted; F1, precision and recall with a threshold of 0.5."""

    support: int
    """Number of examples that have the label."""
    precision: float
    recall: float
    f1: float
    average_precision: float
    """Area under the precision-recall curve; NaN if no example has the label."""


def label_scores(labels: Table, probabilities: Table) -> tuple[list[LabelScore], LabelScore]:
    """Compute the scores of each label, and of all labels pooled.

    Precision, recall and F1 are 0 where they are not defined, as in scikit-learn with
    `zero_division=0`.

    Args:
        labels: 1 where the example has the label, and 0 elsewhere.
        probabilities: Predicted probabilities.
    """
    true, probability = labels.bool(), probabilities.double()
    by_label = [_label_score(*pair) for pair in zip(true.T, probability.T, strict=True)]
    return by_label, _label_score(true.flatten(), probability.flatten())


def _label_score(
    true: Shaped[Tensor, " examples"], probability: Float[Tensor, " examples"]
) -> LabelScore:
    from sklearn.metrics import average_precision_score  # imported on use: half a second

    predicted = probability > THRESHOLD
    hits, support, count = (int(x.sum()) for x in (true & predicted, true, predicted))
    return LabelScore(
        support=support,
        precision=hits / max(count, 1),
        recall=hits / max(support, 1),
        f1=2 * hits / max(support + count, 1),
        average_precision=float(average_precision_score(true.numpy(), probability.numpy()))
        if support
        else math.nan,
    )
