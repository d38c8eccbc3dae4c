"""Curves of several recipes over epochs and over time: the mean over seeds, and their range."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from onescan.report.comparison.groups import Group
from onescan.report.lines import LEAST, Line, line_chart, smoothed, thinned
from onescan.report.runs import Column, FinishedRun
from onescan.report.scales import log_scale, share_scale
from onescan.report.section import Figure, Section
from onescan.report.words import ACCURACY, HOUR, MINUTE, metric_name, metric_value

FEW = 3  # of a unit of time; below that a smaller one is better


class Axis(NamedTuple):
    """What lies along the horizontal axis, and where a run's lines of records lie on it."""

    name: str
    of: Callable[[FinishedRun], Column]


def over_epochs(groups: list[Group]) -> Section:
    """Every metric against passes over the training data."""

    def epochs(run: FinishedRun) -> Column:
        return np.array([line["epoch"] for line in run.records], float)

    lead = f"{_legend(groups)} An epoch is one pass over the training data."
    return Section("Over epochs", _figures(groups, Axis("epoch", epochs)), lead)


def over_time(groups: list[Group]) -> Section:
    """Every metric against the seconds spent on updates."""
    longest = max(run.seconds for group in groups for run in group.runs)
    size, unit = next(
        (size, unit)
        for size, unit in ((HOUR, "hours"), (MINUTE, "minutes"), (1, "seconds"))
        if longest > FEW * size or size == 1
    )

    def spent(run: FinishedRun) -> Column:
        seconds = [line["seconds"] if line["split"] == "train" else 0 for line in run.records]
        return np.cumsum(seconds) / size

    lead = (
        f"{_legend(groups)} Time is that of updates, without evaluations and checkpoints; it "
        f"compares where the recipes ran on equal machines: {_machines(groups)}."
    )
    return Section("Over training time", _figures(groups, Axis(unit, spent)), lead)


def _figures(groups: list[Group], axis: Axis) -> tuple[Figure, ...]:
    names = list(groups[0].runs[0].result.metrics)
    tests = [
        Figure(
            f"Test {metric_name(name)}",
            _test(groups, axis, name),
            "On the held-out images; the axis widens towards 100%."
            if name.endswith(ACCURACY)
            else "On the held-out images, on a logarithmic axis.",
        )
        for name in names
    ]
    training = Figure(
        "Training loss",
        _training(groups, axis),
        "The running mean over batches, on a logarithmic axis. It compares only where labels and "
        "augmentation are the same.",
    )
    return (*tests, training)


def _test(groups: list[Group], axis: Axis, name: str) -> str:
    is_share = name.endswith(ACCURACY)

    def curve(run: FinishedRun) -> tuple[Column, Column]:
        y = run.column("test", name)
        return _along(axis, run, "test"), y if is_share else np.maximum(y, LEAST)

    lines = [_line(group, curve, lambda y: metric_value(name, y)) for group in groups]
    rows = [len(next(iter(g.runs[0].result.evaluation.arrays.values()))) for g in groups]

    def finish(axes: Axes) -> None:
        if not is_share:
            log_scale(axes)
            return
        bands = [part for line in lines for part in (line.band or (line.y,))]
        low, high = min(b.min() for b in bands), max(b.max() for b in bands)
        share_scale(axes, low, high, least=0.5 / max(rows))

    return line_chart(lines, x=axis.name, y=f"test {metric_name(name)}", finish=finish)


def _training(groups: list[Group], axis: Axis) -> str:
    def curve(run: FinishedRun) -> tuple[Column, Column]:
        y = np.maximum(run.column("train", "loss"), LEAST)
        places = thinned(len(y))
        return _along(axis, run, "train")[places], smoothed(y, places)

    lines = [_line(group, curve, lambda y: f"{y:.3f}") for group in groups]
    return line_chart(lines, x=axis.name, y="training loss", finish=log_scale)


def _line(
    group: Group,
    curve: Callable[[FinishedRun], tuple[Column, Column]],
    spell: Callable[[float], str],
) -> Line:
    """Seeds are evaluated at the same steps, so they are averaged there, time included."""
    curves = [curve(run) for run in group.runs]
    shared = min(len(x) for x, _ in curves)  # a seed may have ended early
    x = np.mean([x[:shared] for x, _ in curves], axis=0)
    ys = np.stack([y[:shared] for _, y in curves])
    mean = ys.mean(axis=0)
    band = (ys.min(axis=0), ys.max(axis=0)) if len(ys) > 1 else None
    name = f"{group.letter} {spell(mean[-1])}"
    return Line(name, group.color, x, mean, band=band, style=group.style)


def _along(axis: Axis, run: FinishedRun, split: str) -> Column:
    return axis.of(run)[[line["split"] == split for line in run.records]]


def _legend(groups: list[Group]) -> str:
    listed = ", ".join(f"{group.letter} is {group.name}" for group in groups)
    several = any(len(group.runs) > 1 for group in groups)
    return f"{listed}." + " Line: mean over seeds; band: lowest to highest seed." * several


def _machines(groups: list[Group]) -> str:
    """What the groups ran on."""
    ran = [
        (
            group.letter,
            ", ".join({e.device: None for r in group.runs for e in r.manifest.environments}),
        )
        for group in groups
    ]
    if len({devices for _, devices in ran}) == 1:
        return f"all on {ran[0][1]}"
    return "; ".join(f"{letter} on {devices}" for letter, devices in ran)
