"""Windows of time series as inputs of forecasting models."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from onescan.inputs.format import Format

Context = Float[Tensor, "B channels context"]
Future = Float[Tensor, "B channels horizon"]
PerWindow = Float[Tensor, "B channels 1"]
Quantiles = Float[Tensor, "B quantiles channels horizon"]
Inputs = Float[Tensor, "B inputs steps"]
Outputs = Float[Tensor, "B outputs steps"]


@dataclass(frozen=True, kw_only=True)
class ForecastFormat(Format):
    """Time series of which a model reads the context and forecasts the horizon.

    Values are standardized in float64 with the mean and standard deviation of the observed values
    of each context, and forecasts are converted back. NaN stands for a missing value.
    """

    channels: int
    """Channels that are forecast together; 1 if each column is a series of its own."""
    context: int
    """Steps that the model reads."""
    horizon: int
    """Steps that it forecasts."""
    quantiles: tuple[float, ...]
    """Quantiles that it forecasts, in increasing order; one is 0.5, the median."""
    names: tuple[str, ...] = ()
    """Columns of the channels, in order; () if they have no names or are series of their own."""
    every: str = ""
    """Time between steps, such as 7 days; empty if it is not known."""

    @property
    def median(self) -> int:
        """Index of the median among the quantiles."""
        return self.quantiles.index(0.5)

    def scale(self, context: Context) -> tuple[PerWindow, PerWindow]:
        """Return the mean and standard deviation of the observed values of each context.

        If no value is observed, the mean is NaN.

        Args:
            context: Context of shape [B, channels, context]; NaN where values are missing.

        Returns:
            Mean and standard deviation in float64, of shape [B, channels, 1]. A constant context
            has a standard deviation of 0.
        """
        values = context.double()
        is_observed = ~values.isnan()
        count = is_observed.sum(dim=-1, keepdim=True)
        # Differences from an observed value are exact where values are close together.
        first = values.gather(-1, is_observed.int().argmax(dim=-1, keepdim=True))
        shifted = torch.where(is_observed, values - first, 0)
        shift = shifted.sum(dim=-1, keepdim=True) / count
        deviation = torch.where(is_observed, shifted - shift, 0)
        largest = deviation.abs().amax(dim=-1, keepdim=True)
        largest = torch.where(largest > 0, largest, 1)
        # Divide before squaring, because squares of very large or small values are out of range.
        std = largest * ((deviation / largest) ** 2).sum(dim=-1, keepdim=True).div(count).sqrt()
        return first + shift, std

    def model_input(self, context: Context) -> Inputs:
        """Convert the steps before the forecast to the model's input.

        Args:
            context: Context of shape [B, channels, context]; NaN where values are missing.

        Returns:
            float32 of shape [B, 2 * channels, context + horizon]: the standardized values, with 0
            for missing and future ones, and then masks, which are 1 for observed values.

        Raises:
            ValueError: If the shape does not match, or a value is infinite.
        """
        if context.shape[1:] != (self.channels, self.context):
            raise ValueError(
                f"context has shape {tuple(context.shape)}, expected (B, {self.channels}, "
                f"{self.context})"
            )
        if context.isinf().any():
            raise ValueError(
                "context has infinite values, expected finite numbers, or NaN for missing ones"
            )
        mean, std = self.scale(context)
        is_observed = ~context.isnan()
        values = torch.where(is_observed, (context.double() - mean) / _divisor(std), 0)
        return pad(torch.cat([values, is_observed], dim=1).float(), (0, self.horizon))

    def targets(self, future: Future, context: Context) -> Future:
        """Standardize the steps after a context as the model's targets.

        Args:
            future: Values of shape [B, channels, horizon]; NaN where they are missing.
            context: Context before them, of shape [B, channels, context].

        Returns:
            float32 of shape [B, channels, horizon]; NaN where the value is missing, or no value of
            the context is observed.
        """
        mean, std = self.scale(context)
        return ((future.double() - mean) / _divisor(std)).float()

    def scores(self, outputs: Outputs) -> Quantiles:
        """Return the outputs of a model for the horizon, as standardized quantiles.

        Args:
            outputs: Of shape [B, quantiles * channels, context + horizon].
        """
        shape = (len(self.quantiles), self.channels)
        if outputs.shape[1:] != (shape[0] * shape[1], self.context + self.horizon):
            raise ValueError(
                f"the model returns outputs of shape {tuple(outputs.shape)}, expected (B, "
                f"{shape[0] * shape[1]}, {self.context + self.horizon}): model.out_channels is the "
                f"number of quantiles times the number of channels, {shape[0]} x {shape[1]}"
            )
        return outputs[..., -self.horizon :].unflatten(1, shape)

    def predictions(self, outputs: Outputs, context: Context) -> Quantiles:
        """Convert a model's outputs to quantiles in the units of the series.

        Args:
            outputs: Outputs of the model for ``model_input(context)``.
            context: Context before the forecast, of shape [B, channels, context].

        Returns:
            float64 of shape [B, quantiles, channels, horizon], sorted along the quantiles; equal to
            the context where it is constant, and NaN for channels without an observed value.
        """
        mean, std = (part[:, None] for part in self.scale(context))
        return self.scores(outputs).double().sort(dim=1).values * std + mean


def _divisor(std: PerWindow) -> PerWindow:
    """Return the divisor of values: 1 for constant ones, which are only centered."""
    return torch.where(std > 0, std, 1)
