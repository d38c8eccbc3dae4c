"""Forecasting of your own time series, and of the concentration of CO2 in the air."""

import dataclasses

from onescan.experiments.data import ForecastDatasetConfig
from onescan.experiments.recipes import table
from onescan.experiments.recipes.infer import DENSE_MODEL, INFERRED, infer
from onescan.experiments.tasks import ForecastingConfig
from onescan.experiments.training import RunConfig, TrainingConfig


def forecaster() -> RunConfig:
    """LightNet that forecasts your own time series; settings are inferred from the data.

    onescan train forecaster --data.path FILE.csv --data.horizon 24
    onescan predict runs/forecaster/seed-0 FILE.csv --out forecast.csv

    FILE is a table (.csv, .tsv, .jsonl or .parquet) with a column per series and optionally a
    column of regular times, or an array x of shape [T], [T, channels] or [N, T, channels] (.npz or
    .npy). Empty cells and NaN are missing values. Each column is a series of its own, unless
    --data.joint forecasts them together. The last 20% of the steps are the test period. Horizon,
    context, seasonality, model size, batch size and epochs that are not given as options are
    inferred and printed. The forecasts are quantiles, and are compared with a seasonal naive
    forecast and a linear regression.
    """
    return RunConfig(
        name="forecaster",
        data=ForecastDatasetConfig(path=""),
        task=ForecastingConfig(),
        model=dataclasses.replace(
            DENSE_MODEL,
            image_size=(260,),
            channels=2,
            out_channels=9,
            patch_size=(13,),
            decoder="linear",
        ),
        training=TrainingConfig(
            epochs=12,
            batch_size=32,
            learning_rate=2e-3,
            ema_decay=0.99,
            evaluate_every=3.0,
            checkpoint_every=3.0,
        ),
    )


def co2() -> RunConfig:
    """LightNet that forecasts the weekly CO2 at Mauna Loa, Hawaii, for a year.

    onescan train co2 --seeds 0 1
    onescan predict runs/co2/seed-0 co2 --out forecast.csv

    The series (1958 to 2001, from the Carbon Dioxide Information Analysis Center) is in the public
    domain and comes with the package. The model reads four years.
    """
    return dataclasses.replace(
        forecaster(),
        name="co2",
        data=ForecastDatasetConfig(
            path="co2", context=208, horizon=52, seasonality=52, test_stride=1
        ),
    )


SIZES = {"horizon", "context", "seasonality", "test_stride", "out_channels", "steps"}
EVERY = {"evaluate_every", "checkpoint_every"}
RECIPES = table(forecaster, co2)
RECIPES["forecaster"] = dataclasses.replace(
    RECIPES["forecaster"], infer=infer, inferred=INFERRED | SIZES | EVERY
)
