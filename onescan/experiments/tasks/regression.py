"""Regression: predict one or several real numbers of each example."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import huber_loss, l1_loss, mse_loss

from onescan.checks import check_choice, check_positive
from onescan.experiments.data import ArraySplits, AugmentConfig, ImageSplits
from onescan.experiments.tasks.base import Evaluation, Rows, TaskConfig
from onescan.experiments.tasks.grid import RowTask, check_target, mean
from onescan.shapes import Logits

MAX_LISTED = 10  # values with metrics of their own; reports show all

RegressionLoss = Literal["l2", "l1", "huber"]
LOSSES: dict[RegressionLoss, Callable[..., Tensor]] = {
    "l2": mse_loss,
    "l1": l1_loss,
    "huber": huber_loss,
}
Table = Float[Tensor, "N values"]


@dataclass(frozen=True, kw_only=True)
class RegressionConfig(TaskConfig):
    """Regression on values standardized with their training mean and standard deviation."""

    loss: RegressionLoss = "l2"
    """Loss of the standardized values: squared error (l2), absolute error (l1), or Huber loss
    (huber), which is squared up to an error of one standard deviation and linear beyond."""
    augment: AugmentConfig | None = None
    """Augmentation of training images. It must not change the values to predict."""
    evaluation_batch_size: int = 256
    """Images per evaluation batch; affects memory, not results."""

    def build(self, data: ImageSplits | ArraySplits) -> "Regression":
        """Build the task for a data set with one or several values per example.

        Raises:
            ValueError: If a field is out of range, or the data has classes or labels.
        """
        check_target(self, data, "value")
        check_choice("task.loss", self.loss, get_args(RegressionLoss))
        check_positive(**{"task.evaluation_batch_size": self.evaluation_batch_size})
        return Regression(self, data)


class Regression(RowTask):
    """Regression on one data set."""

    def __init__(self, config: RegressionConfig, data: ImageSplits | ArraySplits) -> None:
        super().__init__(
            data,
            augment=config.augment,
            evaluation_batch_size=config.evaluation_batch_size,
        )
        self.config = config

    def losses(
        self, scores: Logits, labels: Float[Tensor, "B classes"]
    ) -> Float[Tensor, "B classes"]:
        return LOSSES[self.config.loss](scores, self.target.standardize(labels), reduction="none")

    def evaluate(self, rows: Rows) -> Evaluation:
        scores = value_scores(rows["labels"], rows["predictions"])
        metrics = value_metrics(scores, self.class_names)
        metrics["loss"] = rows["losses"].mean().item()
        return Evaluation(metrics=metrics, arrays=rows)

    def score(self, metrics: dict[str, float]) -> float:
        return value_score(metrics)


@dataclass(frozen=True, kw_only=True)
class ValueScore:
    """How well one value is predicted, in its own units."""

    mae: float
    """Mean absolute error."""
    rmse: float
    """Root of the mean squared error."""
    r2: float
    """Share of the variance that is explained; NaN if the true values are all equal."""


def value_metrics(scores: Sequence[ValueScore], names: Sequence[str]) -> dict[str, float]:
    """Return the mean R2, RMSE and MAE over values, and those of each value if there are few."""
    metrics = {}
    if any(not math.isnan(score.r2) for score in scores):
        metrics["r2"] = mean(score.r2 for score in scores)
    metrics["rmse"] = mean(score.rmse for score in scores)
    metrics["mae"] = mean(score.mae for score in scores)
    if 1 < len(scores) <= MAX_LISTED:
        for name, score in zip(names, scores, strict=True):
            output_metrics = {"r2": score.r2, "rmse": score.rmse, "mae": score.mae}
            metrics |= {
                f"{name}_{key}": x for key, x in output_metrics.items() if not math.isnan(x)
            }
    return metrics


def value_score(metrics: Mapping[str, float]) -> float:
    """Return R2, or the negative RMSE if R2 is not defined because all values are equal."""
    return metrics["r2"] if "r2" in metrics else -metrics["rmse"]


def value_scores(values: Table, predictions: Table) -> list[ValueScore]:
    """Compute the scores of each value, in float64."""
    return [
        _value_score(*pair) for pair in zip(values.double().T, predictions.double().T, strict=True)
    ]


def _value_score(
    values: Float[Tensor, " examples"], predictions: Float[Tensor, " examples"]
) -> ValueScore:
    errors = predictions - values
    is_constant = bool((values == values[0]).all())
    spread = torch.linalg.vector_norm(values - values.mean())
    return ValueScore(
        mae=errors.abs().mean().item(),
        rmse=(torch.linalg.vector_norm(errors) / math.sqrt(len(errors))).item(),
        r2=math.nan if is_constant else 1 - (torch.linalg.vector_norm(errors) / spread).item() ** 2,
    )
