"""Section about forecasts: examples with bands, the error by step, and the baselines."""

import numpy as np
from jaxtyping import Float
from torch import Tensor

from onescan.experiments.data.base import Example
from onescan.experiments.report.format import label, metric_name
from onescan.experiments.report.page import Figure, Section, fragment
from onescan.experiments.report.plots import BLUE, MUTED, VERMILION, Line, line_figure, series
from onescan.experiments.report.runs import RunGroup
from onescan.experiments.report.targets import over_seeds, spread
from onescan.experiments.tasks.forecasting import Forecasting

EXAMPLES = 6
SHOWN_HORIZONS = 3  # of the context of an example, at most
SCORES = ("mase", "mae", "weighted_quantile_loss")
MODEL = "model"

Forecasts = Float[Tensor, "windows quantiles channels horizon"]


def section(group: RunGroup) -> Section:
    """Scores beside those of the baselines, the error by step, and forecasts of test windows."""
    assert isinstance(group.task, Forecasting)
    return Section("Forecasts", [_table(group), _by_step(group), *_examples(group)])


def _table(group: RunGroup) -> Figure:
    metrics = group.runs[0].result.metrics
    shown = [name for name in SCORES if name in metrics]
    rows = [("forecast", *map(metric_name, shown))]
    for name in (MODEL, *_task(group).baselines):
        prefix = "" if name == MODEL else f"{name}_"
        rows.append(
            (metric_name(name), *(over_seeds(group.metric(f"{prefix}{key}")) for key in shown))
        )
    caption = (
        f"Errors over {len(group.task.test):,} windows of the test period; lower is better. MAE is "
        "the mean absolute error of the median in the units of the series. MASE divides it by the "
        "error of the seasonal naive forecast in the training period, one season ahead. The "
        "weighted quantile loss is the quantile loss divided by the sum of absolute values. The "
        "baselines read the same windows: the seasonal naive forecast repeats the last season of "
        "steps, and linear is a ridge regression from the standardized context. Their "
        "quantiles are the forecast plus quantiles of its training errors."
        f"{_better_baselines(group, shown[0])}{spread(group)}"
    )
    return Figure("Errors", fragment("table", rows, "numbers lined"), caption, 3)


def _better_baselines(group: RunGroup, score: str) -> str:
    """Say which baselines have a lower mean error than the model."""
    mean = np.mean(group.metric(score))
    names = [
        metric_name(name)
        for name in _task(group).baselines
        if np.mean(group.metric(f"{name}_{score}")) < mean
    ]
    if not names:
        return ""
    verb = "has" if len(names) == 1 else "have"
    return (
        f" {' and '.join(names).capitalize()} {verb} a lower {metric_name(score)} than the model."
    )


def _by_step(group: RunGroup) -> Figure:
    task = _task(group)
    forecasts: list[tuple[str, str, list[Forecasts]]] = [
        (MODEL, BLUE, [run.result.evaluation.arrays["predictions"] for run in group.runs])
    ]
    for i, (name, predictions) in enumerate(task.baselines.items(), start=1):
        forecasts.append((metric_name(name), series(i), [predictions]))
    true = group.runs[0].result.evaluation.arrays["labels"]
    lines = []
    for name, color, by_seed in forecasts:
        errors = [
            (true - each[:, task.format.median]).abs().nanmean(dim=(0, 1)) for each in by_seed
        ]
        y = np.mean([error.numpy() for error in errors], axis=0)
        lines.append(Line(name, color, np.arange(1, len(y) + 1), y))
    mean = ", the mean over seeds" * (len(group.runs) > 1)
    caption = f"Mean absolute error of each step of the horizon{mean}, over all test windows."
    return line_figure(
        lines, caption, title="Error by step", y="mean absolute error", x="step", scale="zero"
    )


def _examples(group: RunGroup) -> list[Figure]:
    """Draw test windows that are evenly spaced over the series and the test period."""
    count = min(len(group.task.test), EXAMPLES)
    indices = [i * (len(group.task.test) - 1) // max(count - 1, 1) for i in range(count)]
    return [_example(group, index) for index in indices]


def _example(group: RunGroup, index: int) -> Figure:
    task = _task(group)
    format, times = task.format, task.data.times
    windows, in_series, starts = task.test.read([Example(index)]).batch
    forecasts = group.runs[0].result.evaluation.arrays["predictions"][index].numpy()
    is_observed = ~windows[0].isnan()
    is_shown = is_observed[:, : format.context].any(dim=1) & is_observed[:, format.context :].any(
        dim=1
    )
    channel = int(is_shown.int().argmax())
    low, middle, high = (forecasts[i, channel] for i in (0, format.median, -1))
    past = min(format.context, SHOWN_HORIZONS * format.horizon)
    truth = windows[0, channel, format.context - past :].numpy()
    steps = np.arange(1, format.horizon + 1)
    lines = [
        Line(
            "truth" if is_observed[channel, -1] else "",
            MUTED,
            np.arange(1 - past, format.horizon + 1),
            truth,
        ),
        Line("forecast", VERMILION, steps, middle, band=(low, high)),
    ]
    name = label(task.data.names[int(in_series)][channel])
    origin = int(starts) + format.context
    begins = times.text(origin) if times else f"step {origin:,}"
    share = format.quantiles[-1] - format.quantiles[0]
    seed = f" of seed {group.runs[0].seed}" * (len(group.runs) > 1)
    caption = (
        f"The median forecast{seed} from {begins} on, and the band from quantile "
        f"{format.quantiles[0]:g} to {format.quantiles[-1]:g}, which should contain {share:.0%} of "
        "the true values."
    )
    return line_figure(lines, caption, title=name, x="step", y=name, mark_x=0.5)


def _task(group: RunGroup) -> Forecasting:
    assert isinstance(group.task, Forecasting)
    return group.task
