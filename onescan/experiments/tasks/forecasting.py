"""Forecasting: predict quantiles of the next steps of time series."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.experiments.data.forecasting import ForecastSplits, Windows, WindowSet
from onescan.experiments.tasks.base import Batch, Evaluation, Metrics, Rows, Task, TaskConfig
from onescan.experiments.tasks.forecast_baselines import (
    LinearForecast,
    seasonal_naive,
    with_quantiles,
)
from onescan.inputs.forecast import Context, ForecastFormat, Future, Quantiles

MEDIAN = 0.5


@dataclass(frozen=True, kw_only=True)
class ForecastingConfig(TaskConfig):
    """Quantile regression of the steps after a context."""

    quantiles: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Quantiles to forecast, in increasing order. One is 0.5, the median, which is the forecast
    that MAE and MASE evaluate."""
    evaluation_batch_size: int = 256
    """Windows per evaluation batch; affects memory, not results."""

    def build(self, data: ForecastSplits) -> "Forecasting":
        """Build the task for windows of time series.

        Raises:
            ValueError: If a field is out of range.
        """
        check_positive(**{"task.evaluation_batch_size": self.evaluation_batch_size})
        numbers = self.quantiles
        is_increasing = sorted(set(numbers)) == list(numbers)
        if not (is_increasing and MEDIAN in numbers and numbers[0] > 0 and numbers[-1] < 1):
            raise ValueError(
                f"task.quantiles is {numbers}, expected increasing numbers between 0 and 1, "
                "including 0.5"
            )
        return Forecasting(self, data)


class Forecasting(Task):
    """Forecasting of one or several time series."""

    unit = "windows"
    train: WindowSet
    test: WindowSet
    format: ForecastFormat

    def __init__(self, config: ForecastingConfig, data: ForecastSplits) -> None:
        self.config, self.data = config, data
        self.train, self.test, self.notes = data.train, data.test, data.notes
        self.test_batch_size = config.evaluation_batch_size
        self.format = ForecastFormat(
            channels=data.train.values.shape[1],
            context=data.train.context,
            horizon=data.train.horizon,
            quantiles=config.quantiles,
            names=data.channel_names,
            every=data.times.every if data.times else "",
        )

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """Standardize windows in float64; they stay on the CPU beside the input and targets."""
        context, future = self._split(batch[0])
        standard = self.format.model_input(context), self.format.targets(future, context)
        return *super().to_device(standard, device), *batch

    def count_labels(self, batch: Batch) -> int:
        _, _, windows, *_ = batch
        context, future = self._split(windows)
        is_scaled = ~context.isnan().all(dim=-1, keepdim=True)
        return int((is_scaled & ~future.isnan()).sum())

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
        inputs, targets, *_ = batch
        losses = self._losses(self.format.scores(model(inputs)).float(), targets)
        return losses.nansum() / (~losses.isnan()).sum().clamp(min=1), {}

    def predict(self, model: nn.Module, batch: Batch) -> Rows:
        inputs, targets, windows, series, _ = batch
        context, future = self._split(windows)
        outputs = model(inputs)
        losses = self._losses(self.format.scores(outputs).float(), targets)
        return {
            "labels": future,
            "predictions": self.format.predictions(outputs.cpu(), context),
            "series": series,
            "losses": losses.flatten(1).nansum(dim=1),
            "observed": (~losses.isnan()).flatten(1).sum(dim=1),
        }

    def evaluate(self, rows: Rows) -> Evaluation:
        """Evaluate the forecasts, and those of the baselines for the same windows.

        All metrics, and the loss, weight each observed value equally, so that windows with missing
        values count less.
        """
        metrics = self.scores(rows, rows["predictions"])
        for name, predictions in self.baselines.items():
            scores = self.scores(rows, predictions)
            metrics |= {f"{name}_{metric}": score for metric, score in scores.items()}
        loss = (rows["losses"].double().sum() / rows["observed"].sum()).item()
        return Evaluation(metrics=metrics | {"loss": loss}, arrays=rows)

    def score(self, metrics: dict[str, float]) -> float:
        """Return the negative MASE, or MAE if MASE is not defined because series are constant."""
        return -metrics["mase"] if "mase" in metrics else -metrics["mae"]

    def scores(self, rows: Rows, predictions: Quantiles) -> dict[str, float]:
        """Compute MASE, if it is defined, MAE, and the weighted quantile loss of forecasts."""
        true = rows["labels"]
        errors = (true - predictions[:, self.format.median]).abs()
        scaled = errors / self.data.errors[rows["series"]][..., None]
        losses = pinball(true, predictions, self.config.quantiles).mean(dim=1)
        is_observed = ~losses.isnan()  # the targets that are observed, after an observed context
        size = true[is_observed].abs().sum()
        scores = {"mase": scaled[is_observed & ~scaled.isnan()].mean().item()}
        scores |= {"mae": errors[is_observed].mean().item()}
        scores |= {"weighted_quantile_loss": (losses[is_observed].sum() / size).item()}
        return {name: score for name, score in scores.items() if score < float("inf")}

    @cached_property
    def baselines(self) -> dict[str, Quantiles]:
        """The forecasts of the baselines for all test windows, by name."""
        naive = partial(
            seasonal_naive, horizon=self.format.horizon, seasonality=self.data.seasonality
        )
        regression = LinearForecast(self.format, self.train)
        return {
            name: with_quantiles(forecast, self.format, self.train, self.test)
            for name, forecast in (("seasonal_naive", naive), ("linear", regression))
        }

    def _losses(self, scores: Quantiles, targets: Future) -> Future:
        return pinball(targets, scores, self.config.quantiles).mean(dim=1)

    def _split(self, windows: Windows) -> tuple[Context, Future]:
        return windows[..., : self.format.context], windows[..., self.format.context :]


def pinball(true: Future, predictions: Quantiles, quantiles: tuple[float, ...]) -> Quantiles:
    """Return twice the quantile loss of each forecast: the absolute error for the median.

    >>> pinball(torch.tensor([[[1.0]]]), torch.zeros(1, 2, 1, 1), (0.5, 0.9)).flatten()
    tensor([1.0000, 1.8000])
    """
    levels = predictions.new_tensor(quantiles)[:, None, None]
    errors = true[:, None] - predictions
    return 2 * torch.maximum(levels * errors, (levels - 1) * errors)
