"""Forecasts of the command predict."""

import math
from typing import TYPE_CHECKING

from onescan.cli.options import echo
from onescan.cli.readers import Sizes
from onescan.messages import plural, printable

if TYPE_CHECKING:
    from torch import nn

    from onescan.experiments.data.series import SeriesTable
    from onescan.inputs.forecast import ForecastFormat

Rows = list[dict[str, object]]


def forecast_rows(
    model: "nn.Module",
    format: "ForecastFormat",
    path: str,
    time_column: str | None,
    sizes: Sizes,
) -> Rows:
    """Forecast the series in a file, print a line for each, and return a row per step.

    The columns of a row are path, series, step (from 1), time (empty if the file has no times),
    forecast (the median), and the quantiles, such as q0.1. Forecasts are None if no value of the
    context is observed.

    Args:
        model: Model in evaluation mode.
        format: Format that the model was trained on.
        path: A table or an array, as for `read_series`.
        time_column: Column of the times in tables; None finds it.
        sizes: The batch size, if it is given.

    Raises:
        ValueError: If the file cannot be read or has other channels than the training data.
    """
    from onescan.experiments.data.series import read_series
    from onescan.inference.forecasting import forecast

    table = read_series(path, time_column)
    if table.times and format.every not in ("", table.times.every):
        raise ValueError(
            f"{path}: the times are {table.times.every} apart, expected {format.every}, as in the "
            "training data"
        )
    try:
        table = _channels(table, format)
        quantiles = forecast(model, table.values, format, **sizes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    rows: Rows = []
    last, times = table.values.shape[-1] - 1, table.times
    names = [f"q{level:g}" for level in format.quantiles]
    for labels, series in zip(table.names, quantiles, strict=True):
        for label, by_step in zip(labels, series.movedim(0, -1).tolist(), strict=True):
            for step, numbers in enumerate(by_step, start=1):
                values = [None if math.isnan(number) else number for number in numbers]
                time = times.text(last + step) if times else None
                row = {"path": path, "series": label, "step": step, "time": time}
                row["forecast"] = values[format.median]
                rows.append(row | dict(zip(names, values, strict=True)))
            until = f" to {time}" if times else ""
            low, middle, high = (f"{numbers[i]:.6g}" for i in (0, format.median, -1))
            summary = (
                f"no forecast, because no value of the last {format.context} steps is known"
                if math.isnan(numbers[0])
                else f"{plural(format.horizon, 'step')}{until}; at the last step {middle} "
                f"({names[0]} {low}, {names[-1]} {high})"
            )
            echo(f"{printable(f'{path}: {label}')}: {summary}")
    return rows


def _channels(table: "SeriesTable", format: "ForecastFormat") -> "SeriesTable":
    """Return the channels that the model reads, in its order."""
    if format.channels == 1:
        return table.separate()
    if format.names and table.has_columns:
        return table.select(format.names)
    if table.values.shape[1] != format.channels:
        raise ValueError(
            f"a series has {plural(table.values.shape[1], 'channel')}, expected "
            f"{format.channels}, which the model forecasts together"
        )
    return table
