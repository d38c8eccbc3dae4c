"""Dense regression: predict one or several real values at each position of a grid."""

import math
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from onescan.checks import check_choice
from onescan.experiments.data import ArraySplits, ImageSplits
from onescan.experiments.tasks.base import Batch, Evaluation, Rows
from onescan.experiments.tasks.dense import DenseTask, DenseTaskConfig, PerExample, mean_loss
from onescan.experiments.tasks.grid import check_target
from onescan.experiments.tasks.regression import (
    LOSSES,
    RegressionLoss,
    ValueScore,
    value_metrics,
    value_score,
)
from onescan.shapes import GridOutputs

ROUNDING = 1e-12  # of a difference of sums in float64, relative to the sums

ValueMaps = Float[Tensor, "B values *axes"]


@dataclass(frozen=True, kw_only=True)
class DenseRegressionConfig(DenseTaskConfig):
    """Regression at each position, on values standardized with their training statistics."""

    loss: RegressionLoss = "l2"
    """Loss of the standardized values: squared error (l2), absolute error (l1), or Huber loss
    (huber), which is squared up to an error of one standard deviation and linear beyond."""

    def build(self, data: ImageSplits | ArraySplits) -> "DenseRegression":
        """Build the task for a data set with values at each position.

        Raises:
            ValueError: If a field is out of range, or the data has other targets.
        """
        check_target(self, data, "value_map")
        self.check_settings(data)
        check_choice("task.loss", self.loss, get_args(RegressionLoss))
        return DenseRegression(self, data)


class DenseRegression(DenseTask):
    """Dense regression on one data set."""

    def __init__(self, config: DenseRegressionConfig, data: ImageSplits | ArraySplits) -> None:
        super().__init__(data, config)
        self.config = config

    def known(self, maps: ValueMaps) -> Bool[Tensor, "B values *axes"]:
        return ~maps.isnan()

    def losses(self, scores: GridOutputs, maps: ValueMaps) -> tuple[PerExample, Int[Tensor, " B"]]:
        known = self.known(maps)
        values = torch.where(known, self.target.standardize(maps), 0)
        errors = LOSSES[self.config.loss](scores, values, reduction="none") * known
        counts = known.flatten(1).sum(dim=1)
        return errors.flatten(1).sum(dim=1) / counts.clamp(min=1), counts

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        maps = batch[1]
        scores = self._predicted(model, batch)
        losses, counts = self.losses(scores, maps)
        known = self.known(maps)
        true = torch.where(known, self.target.standardize(maps), 0).double()
        errors = (scores.double() - true) * known

        def total(x: Tensor) -> Float[Tensor, "B values"]:
            return x.flatten(2).sum(dim=2)

        return {  # sums over the known positions of each example, of standardized values
            "known": total(known.double()),
            "values": total(true),
            "squares": total(true.square()),
            "absolute_errors": total(errors.abs()),
            "squared_errors": total(errors.square()),
            "losses": losses,
            "positions": counts,
        }

    def evaluate(self, rows: Rows) -> Evaluation:
        loss = mean_loss(rows)
        metrics = value_metrics(map_scores(rows, self.target.std), self.class_names)
        return Evaluation(metrics=metrics | {"loss": loss}, arrays=rows)

    def score(self, metrics: dict[str, float]) -> float:
        return value_score(metrics)


def map_scores(rows: Rows, std: tuple[float, ...]) -> list[ValueScore]:
    """Compute the errors of each value, in its own units, from the sums of `predict`.

    Args:
        rows: Sums over positions, with a row per example.
        std: Standard deviation by which each value was divided.
    """
    names = ("known", "values", "squares", "absolute_errors", "squared_errors")
    scores = []
    for unit, known, total, squares, absolute, squared in zip(
        std, *(rows[name].sum(dim=0).tolist() for name in names), strict=True
    ):
        if not known:
            scores.append(ValueScore(mae=math.nan, rmse=math.nan, r2=math.nan))
            continue
        variance = squares - total**2 / known
        is_constant = variance <= ROUNDING * squares
        scores.append(
            ValueScore(
                mae=unit * absolute / known,
                rmse=unit * math.sqrt(squared / known),
                r2=math.nan if is_constant else 1 - squared / variance,
            )
        )
    return scores
