"""Windows of time series: training windows end before the test period; test forecasts lie in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from onescan.checks import check_positive
from onescan.experiments.data.base import DataConfig, DataSet, Example, LoadedBatch, Splits
from onescan.experiments.data.series import SeriesTable, read_series
from onescan.experiments.data.times import Times

MAX_TEST_WINDOWS = 1_000  # with the default test_stride
HORIZONS_PER_CONTEXT = 4  # in an inferred context
MAX_CONTEXT = 512  # inferred contexts are at most this long
MIN_HORIZONS = 20  # per series, if the horizon is inferred for a series without seasons

Windows = Float64[Tensor, "B channels steps"]


class Sizes(NamedTuple):
    """The fields of `ForecastDatasetConfig` of the same names."""

    context: int
    horizon: int
    seasonality: int
    test_stride: int


@dataclass(frozen=True, kw_only=True)
class ForecastDatasetConfig(DataConfig):
    """Time series to forecast, in a table or an array.

    A table (.csv, .tsv, .jsonl or .parquet) has a column per series and optionally one of times,
    which must be regular. An array x has shape [T], [T, channels] or [N, T, channels], in a .npz or
    .npy file. Empty cells and NaN are missing values: the model reads them as such, and the loss
    and the metrics ignore them. The last part of the series is the test period.
    """

    path: str
    """The file; or co2, the weekly concentration of CO2 at Mauna Loa."""
    horizon: int | None = None
    """Steps to forecast. None infers one season, or a twentieth of a series without seasons."""
    context: int | None = None
    """Steps that the model reads before the forecast. None infers four times the horizon if the
    series are long enough."""
    seasonality: int | None = None
    """Steps per season, for the seasonal naive forecast and MASE. None infers it from the times: 12
    for months, 52 for weeks, 7 for days, 24 for hours, and 1 (no season) without times."""
    joint: bool = False
    """Whether the columns or channels are forecast together, so that one can help to predict
    another. Otherwise, each is a series of its own, and one model forecasts all of them."""
    time_column: str | None = None
    """Column of the times. None uses the first column if it is called time, date or the like, or
    holds dates."""
    test_fraction: float = 0.2
    """Length of the test period as a fraction of the series."""
    test_stride: int | None = None
    """Steps between the origins of test forecasts. None chooses the smallest number that gives at
    most 1,000 test windows."""

    def resolved(self) -> "ForecastDatasetConfig":
        """Return the config with horizon, context, seasonality and stride inferred from the data.

        Raises:
            ValueError: As `build`.
        """
        return replace(self, **self._sizes(self._read())._asdict())

    def build(self) -> "ForecastSplits":
        """Read the series and choose the windows.

        Raises:
            ValueError: If the data cannot be read (see `read_series`), a field is out of range, or
                the series are too short.
        """
        table = self._read()
        context, horizon, season, stride = self._sizes(table)
        values, length = table.values, table.values.shape[-1]
        begin = length - self._test_length(length, horizon)
        windows = WindowSet(
            values=values, starts=torch.zeros(0, 2).long(), context=context, horizon=horizon
        )
        train = windows.starting_at(range(begin - context - horizon + 1))
        last, first = length - context - horizon, begin - context
        test = windows.starting_at(range(last, first - 1, -stride)[::-1])
        for part, data in (("training", train), ("test", test)):
            if not len(data):
                raise ValueError(
                    f"data.path is {self.path!r}, where no {part} window of {context} + {horizon} "
                    "steps has an observed value both in its context and in its horizon"
                )
        held_out = f"the last {length - begin:,} of {length:,} steps are the test period"
        if table.times:
            held_out += f", from {table.times.text(begin)} on"
        return ForecastSplits(
            train=train,
            test=test,
            seasonality=season,
            errors=_naive_errors(values[..., :begin], season),
            names=table.names,
            times=table.times,
            channel_names=table.names[0] if table.has_columns and values.shape[1] > 1 else (),
            notes=(*table.notes, held_out),
        )

    def _read(self) -> SeriesTable:
        table = read_series(self.path, self.time_column)
        return table if self.joint else table.separate()

    def _test_length(self, length: int, horizon: int) -> int:
        return max(math.ceil(self.test_fraction * length), horizon)

    def _sizes(self, table: SeriesTable) -> "Sizes":
        given = {f"data.{name}": getattr(self, name) for name in Sizes._fields}
        check_positive(**{name: size for name, size in given.items() if size is not None})
        if not 0 < self.test_fraction < 1:
            raise ValueError(
                f"data.test_fraction is {self.test_fraction}, expected between 0 and 1"
            )
        length = table.values.shape[-1]
        season = self.seasonality or (table.times.seasonality if table.times else 1)
        usual = season if season > 1 else length // MIN_HORIZONS
        horizon = self.horizon or max(min(usual, length // 10), 1)
        training = length - self._test_length(length, horizon)
        usual = min(HORIZONS_PER_CONTEXT * horizon, MAX_CONTEXT)
        context = self.context or max(min(max(usual, season), 2 * (training - horizon) // 3), 1)
        if training < context + horizon:
            raise ValueError(
                f"data.path is {self.path!r}, which has {length} steps, {max(training, 0)} of them "
                f"before the test period, expected at least {context + horizon} before it: "
                f"data.context {context} + data.horizon {horizon}"
            )
        if self.seasonality is None and season > context:
            season = 1
        if season > context:
            raise ValueError(
                f"data.seasonality is {season}, but data.context is {context}, expected at least "
                "one season"
            )
        origins = length - training - horizon + 1
        most = max(MAX_TEST_WINDOWS // len(table.values), 1)
        stride = self.test_stride or math.ceil(origins / most)
        return Sizes(context, horizon, season, stride)


@dataclass(frozen=True, kw_only=True)
class WindowSet(DataSet):
    """Windows of series: a batch is (values, series, starts).

    The values have shape [B, channels, context + horizon], in float64.

    Attributes:
        values: All series; NaN where values are missing.
        starts: Series and first step of each window.
        context: Steps before the forecast.
        horizon: Steps of the forecast.
    """

    values: Float64[Tensor, "N channels time"]
    starts: Int[Tensor, "windows 2"]
    context: int
    horizon: int

    def __len__(self) -> int:
        return len(self.starts)

    def starting_at(self, steps: Sequence[int]) -> "WindowSet":
        """Return the windows of all series that start at the given steps and can be evaluated.

        A channel must have an observed value in the context and one in the horizon.
        """
        first = torch.tensor(steps, dtype=torch.long)
        origin = first + self.context
        observed = torch.nn.functional.pad((~self.values.isnan()).cumsum(dim=-1), (1, 0))
        past = observed[..., origin] - observed[..., first]
        future = observed[..., origin + self.horizon] - observed[..., origin]
        series, index = ((past > 0) & (future > 0)).any(dim=1).nonzero(as_tuple=True)
        return replace(self, starts=torch.stack([series, first[index]], dim=1))

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        """Read a batch."""
        series, starts = self.starts[[example.source for example in examples]].T
        steps = starts[:, None] + torch.arange(self.context + self.horizon)
        values = self.values.movedim(-1, 1)[series[:, None], steps].movedim(1, -1)
        return LoadedBatch((values.contiguous(), series, starts))


@dataclass(frozen=True, kw_only=True)
class ForecastSplits(Splits):
    """Training and test windows of time series."""

    train: WindowSet
    test: WindowSet
    seasonality: int
    """Steps per season; 1 if there is none."""
    errors: Float64[Tensor, "N channels"]
    """Mean absolute error of the seasonal naive forecast in the training period, which scales MASE;
    NaN where it is 0 or not defined."""
    names: tuple[tuple[str, ...], ...]
    """Name of each channel of each series."""
    times: Times | None
    """The time of each step, if it is known."""
    channel_names: tuple[str, ...]
    """Columns that are forecast together; () if each is a series of its own."""


def _naive_errors(
    values: Float64[Tensor, "N channels time"], seasonality: int
) -> Float64[Tensor, "N channels"]:
    changes = (values[..., seasonality:] - values[..., :-seasonality]).abs().nanmean(dim=-1)
    return torch.where(changes > 0, changes, torch.nan)
