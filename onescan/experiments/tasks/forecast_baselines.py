"""Baselines of forecasting: the seasonal naive forecast, and linear regression on the context."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from onescan.experiments.data.base import Example
from onescan.experiments.data.forecasting import WindowSet
from onescan.inputs.forecast import Context, ForecastFormat, Future, Quantiles

MAX_WINDOWS = 2_048  # of the training data
ROUNDS = 3  # of fitting, if missing targets are replaced by predictions
BATCH = 1_024
ALPHAS = (0.1, 1.0, 10.0, 100.0, 1_000.0)  # ridge penalties to choose from

Features = Float32[Tensor, "windows features"]
Targets = Float32[Tensor, "windows targets"]


def seasonal_naive(context: Context, horizon: int, seasonality: int) -> Future:
    """Repeat the last season; missing values are those of earlier seasons, or the last value.

    Args:
        context: Values of shape [B, channels, context]; NaN where they are missing.
        horizon: Steps to forecast.
        seasonality: Steps per season, at most the context.

    >>> seasonal_naive(torch.tensor([[[1.0, 2.0, 3.0, float("nan")]]]), 3, 2)
    tensor([[[3., 2., 3.]]])
    """
    length = context.shape[-1]
    season = context[..., length - seasonality :]
    for end in range(length - seasonality, seasonality - 1, -seasonality):
        season = torch.where(season.isnan(), context[..., end - seasonality : end], season)
    steps = torch.arange(length)
    newest = torch.where(context.isnan(), -1, steps).argmax(dim=-1, keepdim=True)
    season = torch.where(season.isnan(), context.gather(-1, newest), season)
    return season.repeat(1, 1, -(-horizon // seasonality))[..., :horizon]


class LinearForecast:
    """Ridge regression from the standardized context to all steps of the horizon.

    The penalty is chosen by leave-one-out cross-validation. Missing values of the context are 0,
    and missing targets are replaced by the regression's own predictions, which are then refined.
    """

    def __init__(self, format: ForecastFormat, train: WindowSet) -> None:
        from sklearn.linear_model import RidgeCV  # imported on use: half a second

        self.format = format
        windows = list(batches(train))
        inputs = torch.cat([self._features(x) for x, _ in windows]).numpy()
        targets = torch.cat([format.targets(y, x).flatten(1) for x, y in windows])
        is_observed = ~targets.isnan()
        filled = torch.where(is_observed, targets, 0)
        for _ in range(1 if is_observed.all() else ROUNDS):
            self.model = RidgeCV(alphas=ALPHAS).fit(inputs, filled.numpy())
            filled = torch.where(is_observed, targets, self._predict(inputs))

    def __call__(self, context: Context) -> Future:
        standard = self._predict(self._features(context).numpy()).double()
        mean, std = self.format.scale(context)
        return standard.unflatten(1, (self.format.channels, -1)) * std + mean

    def _predict(self, inputs: Float32[np.ndarray, "windows features"]) -> Targets:
        predicted = torch.as_tensor(self.model.predict(inputs), dtype=torch.float32)
        return predicted.reshape(len(inputs), -1)  # a single target has no axis

    def _features(self, context: Context) -> Features:
        inputs = self.format.model_input(context)
        return inputs[:, : self.format.channels, : self.format.context].flatten(1)


def with_quantiles(
    forecast: Callable[[Context], Future], format: ForecastFormat, train: WindowSet, test: WindowSet
) -> Quantiles:
    """Forecast quantiles of the test windows.

    They are the forecast plus the quantiles of its standardized training errors. The median is the
    forecast itself.
    """
    errors = torch.cat(
        [format.targets(y, x) - format.targets(forecast(x), x) for x, y in batches(train)]
    )
    spread = errors.double().nanquantile(errors.new_tensor(format.quantiles).double(), dim=0)
    spread[format.median] = 0
    forecasts = []
    for context, _ in batches(test, limit=len(test)):
        _, std = format.scale(context)
        forecasts.append(forecast(context)[:, None] + spread * std[:, None])
    return torch.cat(forecasts)


def batches(windows: WindowSet, limit: int = MAX_WINDOWS) -> Iterator[tuple[Context, Future]]:
    """Yield the contexts and futures of at most `limit` windows, spread evenly."""
    count = min(len(windows), limit)
    indices = [i * len(windows) // count for i in range(count)]
    for start in range(0, count, BATCH):
        values, *_ = windows.read(
            [Example(index) for index in indices[start : start + BATCH]]
        ).batch
        yield values[..., : windows.context], values[..., windows.context :]
