"""Forecast time series with a trained model."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from onescan.inputs.forecast import ForecastFormat, Quantiles

Series = Float[Tensor, "B channels time"]


@torch.no_grad()
def forecast(
    model: nn.Module, values: Series, format: ForecastFormat, *, batch_size: int = 256
) -> Quantiles:
    """Forecast the steps after the end of each series.

    Args:
        model: Model in evaluation mode, as `load` returns it.
        values: Series of shape [B, channels, time], in the steps of the training data; NaN where
            values are missing. Only the last ``format.context`` steps are read; shorter series are
            padded with missing values at the beginning.
        format: Format that the model was trained on, as `load` returns it.
        batch_size: Series per batch; affects memory, and results only by rounding.

    Returns:
        Quantiles in the units of the series, as float64 of shape [B, quantiles, channels, horizon]
        in the order of ``format.quantiles``; NaN for channels of which no value is observed.

    Raises:
        ValueError: If there are other channels, or no steps.
    """
    if not values.shape[-1]:
        raise ValueError("values has no steps, expected at least one")
    device = next(model.parameters()).device
    missing = max(format.context - values.shape[-1], 0)
    contexts = pad(values[..., -format.context :], (missing, 0), value=torch.nan).split(batch_size)
    outputs = (model(format.model_input(context).to(device)).cpu() for context in contexts)
    pairs = zip(outputs, contexts, strict=True)
    return torch.cat([format.predictions(output, context) for output, context in pairs])
