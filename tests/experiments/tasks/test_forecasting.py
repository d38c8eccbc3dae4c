"""Forecasting: windows, losses, metrics, baselines, runs and predictions."""

import csv
import json
from dataclasses import replace
from datetime import date, timedelta

import numpy as np
import pytest
import torch
from html_page import Page, charts, table
from sklearn.linear_model import Ridge
from sklearn.metrics import mean_pinball_loss
from tiny_run import assert_same, interrupt, tiny_run

from onescan.cli import main
from onescan.experiments.data import Example, ForecastDatasetConfig
from onescan.experiments.recipes import find_recipe
from onescan.experiments.report import write_report
from onescan.experiments.tasks import ForecastingConfig
from onescan.experiments.tasks.forecast_baselines import (
    ALPHAS,
    LinearForecast,
    batches,
    seasonal_naive,
    with_quantiles,
)
from onescan.experiments.training import train
from onescan.inference.forecasting import forecast
from onescan.inference.loading import load
from onescan.inputs import ForecastFormat
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.models.dense_predictor import DensePredictorConfig

RNG = np.random.default_rng(0)
STEPS, CONTEXT, HORIZON, SEASON = 120, 12, 3, 4
TIME = np.arange(STEPS)
X = np.stack([np.sin(TIME * np.pi / 2) + 0.01 * TIME, 1e9 + RNG.normal(size=STEPS)], 1)
SIZES = {"context": CONTEXT, "horizon": HORIZON, "seasonality": SEASON}
QUANTILES = (0.1, 0.5, 0.9)
CPU = torch.device("cpu")


def save(path, x=X):
    np.save(path, x)
    return str(path)


def splits(tmp_path, x=X, **options):
    return ForecastDatasetConfig(path=save(tmp_path / "a.npy", x), **{**SIZES, **options}).build()


def task_of(tmp_path, x=X, **options):
    return ForecastingConfig(quantiles=QUANTILES).build(splits(tmp_path, x, **options))


def read(data, places=None):
    return data.read([Example(i) for i in (range(len(data)) if places is None else places)]).batch


def model_config(channels=1):
    return DensePredictorConfig(
        image_size=(CONTEXT + HORIZON,),
        channels=2 * channels,
        out_channels=len(QUANTILES) * channels,
        patch_size=(4,),
        width=8,
        depth=1,
        mixer=SoftmaxMixerConfig(num_heads=2),
        decoder="linear",
        drop_path=0.0,
    )


def tiny(path, *, joint=False, **training):
    return replace(
        tiny_run(**training),
        data=ForecastDatasetConfig(path=path, joint=joint, **SIZES),
        task=ForecastingConfig(quantiles=QUANTILES),
        model=model_config(2 if joint else 1),
    )


def onescan(*argv):
    return main([str(argument) for argument in argv])


def table_of(path, x=X, first=date(2020, 1, 1), days=1):
    lines = [
        ",".join([str(first + timedelta(days * i)), *("" if np.isnan(v) else repr(v) for v in row)])
        for i, row in enumerate(x.tolist())
    ]
    path.write_text("\n".join(["date,a,b", *lines]))
    return path


# Windows


def test_training_windows_end_before_the_test_period(tmp_path):
    data = splits(tmp_path, test_fraction=0.25)
    begin = 90
    assert "the last 30 of 120 steps are the test period" in data.notes
    series, starts = data.train.starts.T
    assert series.unique().tolist() == [0, 1]
    ends = starts + CONTEXT + HORIZON
    assert (starts.min(), ends.max()) == (0, begin)
    assert len(data.train) == 2 * (begin - CONTEXT - HORIZON + 1)
    origins = data.test.starts[:, 1] + CONTEXT
    assert origins.unique().tolist() == list(range(begin, STEPS - HORIZON + 1))
    rolled = splits(tmp_path, test_fraction=0.25, test_stride=10).test.starts[:, 1] + CONTEXT
    assert rolled.unique().tolist() == [97, 107, 117]  # the last forecast ends with the series


def test_the_test_period_changes_nothing_in_training(tmp_path):
    changed = X.copy()
    changed[96:] = RNG.normal(size=(24, 2)) * 1e6
    ours, theirs = splits(tmp_path), splits(tmp_path, changed)
    assert torch.equal(ours.train.starts, theirs.train.starts)
    assert torch.equal(read(ours.train)[0], read(theirs.train)[0])
    assert torch.equal(ours.errors, theirs.errors)
    context = read(ours.test)[0][..., :CONTEXT]
    task = ForecastingConfig(quantiles=QUANTILES)
    linear = [LinearForecast(task.build(each).format, each.train) for each in (ours, theirs)]
    assert torch.equal(*(each(context) for each in linear))


def test_windows_are_those_of_the_series(tmp_path):
    data = splits(tmp_path, joint=True)
    values, series, starts = read(data.train, [0, 5])
    assert (values.dtype, values.shape) == (torch.float64, (2, 2, CONTEXT + HORIZON))
    assert (series.tolist(), starts.tolist()) == ([0, 0], [0, 5])
    assert np.array_equal(values[1].numpy(), X[5:20].T)
    many = RNG.normal(size=(3, STEPS, 2))
    values, series, starts = read(splits(tmp_path, many).train, [-1])
    assert (series.item(), starts.item()) == (5, 81)
    assert np.array_equal(values[0, 0].numpy(), many[2, 81:96, 1])


def test_windows_without_observed_values_are_left_out(tmp_path):
    x = X.copy()
    x[20:50, 0] = np.nan
    data = splits(tmp_path, x)
    windows = read(data.train)[0]
    known = ~windows.isnan()
    assert known[..., :CONTEXT].any(-1).all()
    assert known[..., CONTEXT:].any(-1).all()
    assert data.notes[0] == "30 of 240 values are missing (12.5%)"
    assert len(splits(tmp_path, x, joint=True).train) == 82  # the other channel is observed
    assert len(data.train) == 2 * 82 - 31  # starts 8 to 38
    with pytest.raises(ValueError, match=r"no test window of 12 \+ 3 steps has an observed value"):
        splits(tmp_path, np.where(TIME < 96, X[:, 0], np.nan))


@pytest.mark.parametrize(
    ("steps", "options", "sizes"),
    [
        (400, {}, (20, 80, 1, 1)),
        (400, {"seasonality": 12}, (12, 48, 12, 1)),
        (400, {"horizon": 7, "seasonality": 24}, (7, 28, 24, 1)),
        (60, {}, (3, 12, 1, 1)),
        (30, {"horizon": 8}, (8, 9, 1, 1)),
        (9000, {"horizon": 200}, (200, 512, 1, 2)),
    ],
)
def test_sizes_are_inferred(tmp_path, steps, options, sizes):
    path = save(tmp_path / "a.npy", RNG.normal(size=steps))
    config = ForecastDatasetConfig(path=path, **options).resolved()
    found = config.horizon, config.context, config.seasonality, config.test_stride
    assert found == sizes
    assert config.resolved() == config


def test_the_season_is_that_of_the_times(tmp_path):
    path = str(table_of(tmp_path / "a.csv"))
    assert ForecastDatasetConfig(path=path).resolved().seasonality == 7
    assert ForecastDatasetConfig(path=path, context=5).resolved().seasonality == 1
    data = ForecastDatasetConfig(path=path).build()
    assert data.notes[-1] == "the last 24 of 120 steps are the test period, from 2020-04-06 on"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon": 0}, r"data\.horizon is 0"),
        ({"test_stride": 0}, r"data\.test_stride is 0"),
        ({"test_fraction": 1.0}, r"data\.test_fraction is 1\.0, expected between 0 and 1"),
        (
            {"context": 94},
            r"has 120 steps, 96 of them before the test period, expected at least 97 before it",
        ),
        (
            {"seasonality": 13},
            r"data\.seasonality is 13, but data\.context is 12, expected at least",
        ),
    ],
)
def test_unusable_sizes_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        splits(tmp_path, **options)


# The task


@pytest.mark.parametrize("joint", [False, True])
def test_the_loss_is_that_of_scikit_learn(tmp_path, joint):
    task = task_of(tmp_path, joint=joint)
    model = model_config(2 if joint else 1).build()
    batch = task.to_device(read(task.train, range(20)), CPU)
    scores = task.format.scores(model(batch[0])).detach()
    expected = [
        2 * mean_pinball_loss(batch[1].flatten(), scores[:, i].flatten(), alpha=quantile)
        for i, quantile in enumerate(QUANTILES)
    ]
    assert task.loss(model, batch)[0].item() == pytest.approx(np.mean(expected), rel=1e-5)
    assert task.count_labels(batch) == 20 * HORIZON * (1 + joint)


def test_missing_values_change_nothing(tmp_path):
    x = X.copy()
    x[30:33], x[99, 0] = np.nan, np.nan
    task, model = task_of(tmp_path, x, joint=True), model_config(2).build()
    batch = task.to_device(read(task.train, range(30)), CPU)
    loss, _ = task.loss(model, batch)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    targets = batch[1]
    known = ~targets.isnan()
    assert task.count_labels(batch) == known.sum() < known.numel()
    scores = task.format.scores(model(batch[0])).detach()
    losses = [
        2 * mean_pinball_loss(targets[known], scores[:, i][known], alpha=quantile)
        for i, quantile in enumerate(QUANTILES)
    ]
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-5)
    held_out = task.to_device(read(task.test), CPU)
    rows = task.predict(model.eval(), held_out)
    weighted = task.loss(model, held_out)[0].item()  # each observed value counts equally
    assert task.evaluate(rows).metrics["loss"] == pytest.approx(weighted, rel=1e-5)
    filled = {**rows, "predictions": rows["predictions"].clone()}
    filled["predictions"].movedim(1, -1)[rows["labels"].isnan()] = 1e30
    assert task.scores(rows, filled["predictions"]) == task.scores(rows, rows["predictions"])
    nothing = batch[0], torch.full_like(targets, torch.nan), *batch[2:]
    assert task.loss(model, nothing)[0].item() == 0


def test_predictions_do_not_depend_on_the_future(tmp_path):
    task, model = task_of(tmp_path), model_config().build().eval()
    windows, *others = read(task.test)
    changed = windows.clone()
    changed[..., CONTEXT:] = RNG.normal() * 1e6
    ours, theirs = (
        task.predict(model, task.to_device((each, *others), CPU)) for each in (windows, changed)
    )
    assert torch.equal(ours["predictions"], theirs["predictions"])
    assert torch.equal(ours["labels"], windows[..., CONTEXT:])


def test_metrics_equal_their_definitions(tmp_path):
    task = task_of(tmp_path)
    windows, series, _ = read(task.test)
    true = windows[..., CONTEXT:].numpy()
    predicted = true[:, None] + RNG.normal(size=(len(true), 3, 1, HORIZON))
    rows = {
        "labels": torch.from_numpy(true),
        "predictions": torch.from_numpy(predicted),
        "series": series,
        "losses": torch.ones(len(true)),
        "observed": torch.full((len(true),), HORIZON),
    }
    metrics = task.evaluate(rows).metrics
    errors = np.abs(true - predicted[:, 1])
    scale = np.array([np.abs(X[SEASON:96, i] - X[: 96 - SEASON, i]).mean() for i in (0, 1)])
    assert metrics["mae"] == pytest.approx(errors.mean())
    assert metrics["mase"] == pytest.approx((errors / scale[series][:, None, None]).mean())
    losses = [
        mean_pinball_loss(true.flatten(), predicted[:, i].flatten(), alpha=quantile) * true.size
        for i, quantile in enumerate(QUANTILES)
    ]
    expected = 2 * np.mean(losses) / np.abs(true).sum()
    assert metrics["weighted_quantile_loss"] == pytest.approx(expected)
    assert task.score(metrics) == -metrics["mase"]
    assert list(metrics)[:3] == ["mase", "mae", "weighted_quantile_loss"]
    assert list(metrics)[-2:] == ["linear_weighted_quantile_loss", "loss"]
    naive = np.abs(true - windows[..., CONTEXT - SEASON : CONTEXT - 1].numpy()).mean()
    assert metrics["seasonal_naive_mae"] == pytest.approx(naive)


def test_constant_series_have_no_mase(tmp_path):
    task = task_of(tmp_path, np.full(STEPS, 7.0))
    rows = task.predict(model_config().build().eval(), task.to_device(read(task.test), CPU))
    metrics = task.evaluate(rows).metrics
    assert "mase" not in metrics
    assert task.score(metrics) == -metrics["mae"]
    assert metrics["linear_mae"] == metrics["seasonal_naive_mae"] == 0
    one_constant = np.stack([X[:, 0], np.full(STEPS, 7.0)], 1)
    assert torch.equal(
        splits(tmp_path, one_constant).errors.isnan().flatten(), torch.tensor([0, 1]).bool()
    )


@pytest.mark.parametrize(
    "quantiles", [(), (0.1, 0.9), (0.5, 0.5), (0.9, 0.5), (0.0, 0.5), (0.5, 1.0)]
)
def test_unusable_quantiles_are_refused(tmp_path, quantiles):
    with pytest.raises(ValueError, match=r"task\.quantiles is .*, expected increasing numbers"):
        ForecastingConfig(quantiles=quantiles).build(splits(tmp_path))


# Baselines


def test_the_seasonal_naive_forecast_fills_missing_values():
    nan = torch.nan
    context = torch.tensor(
        [[[1.0, 2, 3, 4, 5, nan, nan, 8], [nan, nan, nan, nan, 9, nan, nan, nan]]]
    )
    expected = [[5, 2, 3, 8, 5, 2], [9, 9, 9, 9, 9, 9]]
    assert seasonal_naive(context, 6, 4)[0].tolist() == expected
    assert seasonal_naive(context[:, :1], 3, 1)[0].tolist() == [[8, 8, 8]]
    assert seasonal_naive(context[:, :1] * nan, 3, 1).isnan().all()


@pytest.mark.parametrize("missing", [False, True])
def test_the_linear_baseline_is_a_ridge_regression(tmp_path, missing):
    x = X[:, 1].copy()
    if missing:
        x[[20, 50]] = np.nan
    data = splits(tmp_path, x)
    format = ForecastingConfig().build(data).format
    linear = LinearForecast(format, data.train)
    context = read(data.test)[0][..., :CONTEXT]
    mean, std = format.scale(context)
    windows = read(data.train)[0]
    inputs = format.model_input(windows[..., :CONTEXT])[:, 0, :CONTEXT].numpy()
    targets = format.targets(windows[..., CONTEXT:], windows[..., :CONTEXT])[:, 0].numpy()
    features = format.model_input(context)[:, 0, :CONTEXT].numpy()
    for step in range(HORIZON):
        known = ~np.isnan(targets[:, step])
        assert known.all() != missing
        predictions = [
            Ridge(alpha).fit(inputs[known], targets[known, step]).predict(features)
            for alpha in ALPHAS
        ]
        got = ((linear(context) - mean) / std)[:, 0, step].numpy()
        assert min(np.abs(got - each).max() for each in predictions) < (1e-3 if missing else 1e-4)


def test_quantiles_of_a_baseline_are_those_of_its_training_errors(tmp_path):
    data = splits(tmp_path)
    format = ForecastingConfig(quantiles=QUANTILES).build(data).format

    def last(context):
        return context[..., -1:].expand(-1, -1, HORIZON)

    predictions = with_quantiles(last, format, data.train, data.test)
    (context, _), *_ = batches(data.test)
    (past, future), *_ = batches(data.train)
    assert torch.equal(predictions[:, 1], last(context))
    errors = ((future - last(past)) / format.scale(past)[1]).double()
    expected = errors.quantile(0.9, dim=0) * format.scale(context)[1] + last(context)
    torch.testing.assert_close(predictions[:, 2], expected, atol=1e-5, rtol=0)


# Runs and predictions


@pytest.mark.parametrize("joint", [False, True])
def test_a_resumed_run_gives_the_same_numbers(tmp_path, joint):
    x = X.copy()
    x[10:13] = np.nan
    run = tiny(save(tmp_path / "a.npy", x), joint=joint, epochs=2, batch_size=16)
    whole = train(run, tmp_path / "whole")
    interrupt(run, tmp_path / "parts", step=3)
    assert_same(train(run, tmp_path / "parts"), whole)


def test_a_trained_model_forecasts(tmp_path):
    path = save(tmp_path / "a.npy")
    result = train(tiny(path, joint=True, epochs=1, batch_size=16), tmp_path / "run")
    trained = load(tmp_path / "run")
    assert isinstance(trained.format, ForecastFormat)
    values = torch.from_numpy(X).T[None]
    predictions = forecast(trained.model, values[..., :-HORIZON], trained.format)
    assert predictions.shape == (1, 3, 2, HORIZON)
    torch.testing.assert_close(predictions[0], result.evaluation.arrays["predictions"][-1])
    short = values[..., :7]
    padded = torch.cat([torch.full((1, 2, 5), torch.nan).double(), short], dim=-1)
    expected = forecast(trained.model, padded, trained.format)
    assert torch.equal(forecast(trained.model, short, trained.format), expected)
    assert expected.isfinite().all()
    with pytest.raises(ValueError, match="values has no steps"):
        forecast(trained.model, values[..., :0], trained.format)


def test_reports_show_forecasts_beside_baselines(tmp_path):
    path = str(table_of(tmp_path / "a.csv"))
    runs = [
        train(tiny(path, epochs=1, batch_size=32, seed=seed), tmp_path / f"seed-{seed}")
        for seed in (0, 1)
    ]
    page = Page(write_report(runs, tmp_path / "report.html").read_text())
    errors = table(page, "forecast")
    assert errors[0] == ["forecast", "MASE", "MAE", "weighted quantile loss"]
    assert [row[0] for row in errors[1:]] == ["model", "seasonal naive", "linear"]
    means = [np.mean([run.metrics[f"{key}mae"] for run in runs]) for key in ("", "linear_")]
    assert [float(errors[i][2].split()[0]) for i in (1, 3)] == pytest.approx(means, rel=1e-3)
    mase = [float(row[1].split()[0]) for row in errors[1:]]
    assert mase[0] > max(mase[1:])  # after one epoch
    assert "Seasonal naive and linear have a lower MASE than the model." in page.text
    drawn = charts(page)
    assert sum("truth" in text for text in drawn) == 6
    assert any(text.startswith("Line chart of mean absolute error over step") for text in drawn)
    assert "from 2020-04-06 on, and the band from quantile 0.1 to 0.9" in page.text
    assert "Quantile loss of standardized values" in page.text


SMALL = ("--model.depth", 1, "--model.width", 16, "--training.epochs", 1, "--machine.trackers")


@pytest.mark.slow
def test_one_command_trains_and_one_forecasts(tmp_path, capsys):
    path, out = table_of(tmp_path / "a.csv"), tmp_path / "out"
    argv = ("--data.path", path, "--data.horizon", 5, "--out", out, *SMALL)
    assert onescan("train", "forecaster", *argv) == 0
    shown, progress = capsys.readouterr()
    assert "data: 2 series, 144 training and 40 test windows" in shown
    assert "windows: 20 steps of context and 5 of forecast, seasons of 7 steps" in shown
    assert "note: times are read from column 'date', with a step of 1 day" in progress
    assert "test seasonal naive mase " in shown
    forecasts = tmp_path / "forecast.csv"
    assert onescan("predict", out / "seed-0", path, "--out", forecasts) == 0
    shown = capsys.readouterr().out
    assert f"{path}: b: 5 steps to 2020-05-04; at the last step 1e+09 (q0.1 " in shown
    with forecasts.open() as stream:
        rows = list(csv.DictReader(stream))
    quantiles = [f"q0.{i}" for i in range(1, 10)]
    assert list(rows[0]) == ["path", "series", "step", "time", "forecast", *quantiles]
    assert [row["series"] for row in rows] == ["a"] * 5 + ["b"] * 5
    times = ["2020-04-30", *(f"2020-05-0{day}" for day in range(1, 5))]
    assert [row["time"] for row in rows] == times * 2
    trained = load(out / "seed-0")
    expected = forecast(trained.model, torch.from_numpy(X.T)[:, None], trained.format)
    got = torch.tensor([[float(row[name]) for name in quantiles] for row in rows])
    got = got.double().unflatten(0, (2, 5))
    torch.testing.assert_close(got, expected[:, :, 0].mT, rtol=1e-6, atol=0)
    assert onescan("predict", out / "seed-0", path, "--out", tmp_path / "forecast.json") == 0
    assert json.loads((tmp_path / "forecast.json").read_text())[0]["time"] == rows[0]["time"]


def test_forecasts_of_unusable_files_are_refused(tmp_path, capsys):
    path = table_of(tmp_path / "a.csv")
    train(tiny(str(path), joint=True, epochs=1, batch_size=32), tmp_path / "run")

    def fails(file):
        assert onescan("predict", tmp_path / "run", file) == 2
        return capsys.readouterr().err

    weekly = table_of(tmp_path / "weekly.csv", days=7)
    assert "the times are 7 days apart, expected 1 day, as in the training data" in fails(weekly)
    other = tmp_path / "other.csv"
    other.write_text(path.read_text().replace("date,a,b", "date,a,c"))
    assert "other.csv: there is no column 'b'" in fails(other)
    array = save(tmp_path / "b.npy", X[:, :1])
    assert "b.npy: a series has 1 channel, expected 2, which" in fails(array)
    other.write_text(path.read_text().replace("date,a,b", "date,b,a"))
    assert onescan("predict", tmp_path / "run", other, "--out", tmp_path / "f.csv") == 0
    lines = [line.split(",") for line in (tmp_path / "f.csv").read_text().split()[1:]]
    days = ("2020-04-30", "2020-05-01", "2020-05-02")
    expected = [[name, str(i), day] for name in "ab" for i, day in enumerate(days, start=1)]
    assert [line[1:4] for line in lines] == expected  # in the order of the training data


def test_series_without_observed_values_have_empty_cells(tmp_path, capsys):
    x = X.copy()
    x[-CONTEXT:, 0] = np.nan
    path = table_of(tmp_path / "a.csv", x)
    train(tiny(str(table_of(tmp_path / "b.csv")), epochs=1, batch_size=32), tmp_path / "run")
    argv = ("predict", tmp_path / "run", path, "--out", tmp_path / "f.csv", "--batch-size", 1)
    assert onescan(*argv) == 0
    assert (
        "a: no forecast, because no value of the last 12 steps is known" in capsys.readouterr().out
    )
    rows = (tmp_path / "f.csv").read_text().split()[1:]
    assert [row.endswith(",,,,") for row in rows] == [True] * 3 + [False] * 3


def test_recipes_are_complete(tmp_path):
    run = find_recipe("co2")()
    assert run.data == run.data.resolved()
    assert run.model.image_size == (run.data.context + run.data.horizon,)
    path = str(table_of(tmp_path / "a.csv"))
    recipe = find_recipe("forecaster")
    given = {"data.joint", "data.horizon", "model.patch_size"}
    data = ForecastDatasetConfig(path=path, joint=True, horizon=6)
    run, lines = recipe.infer(replace(recipe(), data=data), given)
    assert (run.model.channels, run.model.out_channels, run.model.image_size) == (4, 18, (30,))
    assert lines[0].startswith("data: 1 series of 2 channels, ")
    with pytest.raises(ValueError, match=r"data\.path is missing"):
        recipe.infer(recipe())
