"""How training went: loss and accuracy over epochs, every seed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from onescan.report.chart import chart, label_ends, log_scale
from onescan.report.palette import series
from onescan.report.section import Figure, Section
from onescan.report.study import Column, FinishedRun, Study
from onescan.report.words import percent
from onescan.tasks import ImageClassificationConfig
from onescan.training.records import Split

MOST_POINTS = 600
WINDOWS = 40  # the smoothing window is this part of a run
MOST_LABELS = 8
LEAST_LOSS = 1e-6  # so that a loss of 0 has a place on a logarithmic axis
ACCURACY_TICKS = (0.0, 0.3, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0)


def section(study: Study) -> Section:
    """Training loss, test accuracy and test loss."""
    return Section(
        "Training",
        (
            Figure(
                "Training loss",
                _training_loss(study),
                "Cross-entropy of the training batches, on a logarithmic axis: faint, each batch; "
                "strong, the running mean. Lower is better." + _smoothing(study),
            ),
            Figure(
                "Test accuracy",
                _test_accuracy(study),
                "Share of the held-out images that are classified right. The axis widens "
                "towards 100%, where the last mistakes would otherwise merge into a line.",
            ),
            Figure(
                "Test loss",
                _test_loss(study),
                "Cross-entropy of the held-out images. If it rises while the "
                "training loss falls, the model has begun to learn the training images by heart.",
            ),
        ),
    )


def _smoothing(study: Study) -> str:
    task = study.config.task
    if not isinstance(task, ImageClassificationConfig) or not task.label_smoothing:
        return ""
    return (
        f" The labels are smoothed by {task.label_smoothing:g}, in training only, so this "
        "loss cannot fall to 0 and may stay above the test loss."
    )


class Line(NamedTuple):
    """One seed's curve: its points, the value at its end in words, and what was smoothed."""

    x: Column
    y: Column
    end: str
    raw: tuple[Column, Column] | None = None


def _training_loss(study: Study) -> str:
    lines = []
    for run in study.runs:
        x, y = _curve(run, "train", "loss")
        smooth = _running_mean(y)
        lines.append(Line(*_thin(x, smooth), f"{smooth[-1]:.3f}", raw=_thin(x, y)))
    return _lines(study, lines, what="training loss", finish=log_scale)


def _test_accuracy(study: Study) -> str:
    least = 0.5 / len(study.runs[0].result.evaluation.arrays["labels"])

    def stretched(accuracy: Column) -> Column:
        return -np.log10(np.maximum(1 - accuracy, least))  # so that 100% has a place too

    lines = []
    for run in study.runs:
        x, y = _curve(run, "test", "accuracy")
        lines.append(Line(x, stretched(y), percent(y[-1])))

    def finish(axes: Axes) -> None:
        ticks = np.array([t for t in ACCURACY_TICKS if t == 1 or 1 - t > 2 * least])
        low, high = min(line.y.min() for line in lines), max(line.y.max() for line in lines)
        first = np.flatnonzero(stretched(ticks) <= low)[-1]
        last = np.flatnonzero(stretched(ticks) >= high)[0]
        shown = ticks[first : max(last, first + 1) + 1]
        axes.set_yticks(stretched(shown), [f"{100 * tick:g}%" for tick in shown])
        axes.set_ylim(*stretched(shown[[0, -1]]))

    return _lines(study, lines, what="test accuracy", finish=finish)


def _test_loss(study: Study) -> str:
    lines = []
    for run in study.runs:
        x, y = _curve(run, "test", "loss")
        lines.append(Line(x, y, f"{y[-1]:.3f}"))
    return _lines(study, lines, what="test loss", finish=log_scale)


def _lines(study: Study, lines: list[Line], *, what: str, finish: Callable[[Axes], None]) -> str:
    """One line per seed, its name beside its end."""
    named = [
        (line, f"seed {run.seed}: {line.end}", series(i))
        for i, (run, line) in enumerate(zip(study.runs, lines, strict=True))
    ]

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="epoch", ylabel=what)
        for line, _, color in named:
            if line.raw:
                axes.plot(*line.raw, color=color, alpha=0.22, linewidth=0.7)
        for line, _, color in named:
            axes.plot(line.x, line.y, color=color, marker="." if len(line.x) == 1 else "")
        axes.set_xlim(0, max(line.x.max() for line in lines))
        finish(axes)
        if len(lines) <= MOST_LABELS:
            label_ends(axes, [(line.x[-1], line.y[-1], name, color) for line, name, color in named])

    ends = "; ".join(name for _, name, _ in named)
    return chart(draw, alt=f"Line chart of the {what} over epochs, which ends at: {ends}")


def _curve(run: FinishedRun, split: Split, name: str) -> tuple[Column, Column]:
    values = run.column(split, name)
    return run.column(split, "epoch"), np.maximum(values, LEAST_LOSS) if name == "loss" else values


def _running_mean(y: Column) -> Column:
    """Near the ends the mean is over what there is of the window."""
    window = np.ones(max(1, len(y) // WINDOWS))
    weight = np.convolve(np.ones_like(y), window, mode="same")
    return np.convolve(y, window, mode="same") / weight


def _thin(x: Column, y: Column) -> tuple[Column, Column]:
    """Every n-th point, so that a long run's curve stays small; the last is kept."""
    keep = slice((len(x) - 1) % (n := -(-len(x) // MOST_POINTS)), None, n)
    return x[keep], y[keep]
