"""How training went: loss, accuracy, learning rate and gradients over epochs, every seed."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes

from onescan.report.lines import LEAST, Line, line_chart, smoothed, thinned
from onescan.report.palette import BLUE, series
from onescan.report.scales import from_zero, log_scale, share_scale
from onescan.report.section import Figure, Section
from onescan.report.study import FinishedRun, Study
from onescan.report.words import metric_name, percent, significant
from onescan.tasks import ImageClassificationConfig

TOP5 = "top5_accuracy"


def section(study: Study) -> Section:
    """Training loss, what the held-out images say, and what the optimizer did."""
    top5 = (_top5_accuracy(study),) if TOP5 in study.runs[0].result.metrics else ()
    return Section(
        "Training",
        (
            Figure(
                "Training loss",
                _batches(study, "loss", "training loss"),
                "Cross-entropy of the training batches, on a logarithmic axis: faint, each batch; "
                "strong, the running mean. Lower is better." + _smoothing(study),
            ),
            Figure(
                "Test accuracy",
                _share(study, "accuracy"),
                "Share of the held-out images that are classified right. The axis widens "
                "towards 100%, where the last mistakes would otherwise merge into a line.",
            ),
            Figure(
                "Test loss",
                _test_loss(study),
                "Cross-entropy of the held-out images. If it rises while the "
                "training loss falls, the model has begun to learn the training images by heart.",
            ),
            *top5,
            Figure(
                "Learning rate",
                _learning_rate(study),
                "How long a step the optimizer takes. It rises while warming up and then falls, as "
                "the recipe says, in the same way for every seed.",
            ),
            Figure(
                "Length of the gradient",
                _batches(study, "gradient_norm", "gradient norm", limit=_clip(study)),
                "How steep the loss is at each step, on a logarithmic axis: faint, each batch; "
                "strong, the running mean. Spikes are batches that pulled hard." + _clipping(study),
            ),
        ),
    )


def _top5_accuracy(study: Study) -> Figure:
    return Figure(
        "Test top-5 accuracy",
        _share(study, TOP5),
        "Share of the held-out images whose class is among the five likeliest.",
    )


def _smoothing(study: Study) -> str:
    task = study.config.task
    if not isinstance(task, ImageClassificationConfig) or not task.label_smoothing:
        return ""
    return (
        f" The labels are smoothed by {task.label_smoothing:g}, in training only, so this "
        "loss cannot fall to 0 and may stay above the test loss."
    )


def _clip(study: Study) -> float | None:
    return study.config.training.clip_norm


def _clipping(study: Study) -> str:
    clip = _clip(study)
    return f" Dashed: what is longer than {clip:g} is shortened to it." if clip else ""


def _batches(study: Study, name: str, what: str, *, limit: float | None = None) -> str:
    """A number of every training batch, and its running mean."""

    def line(run: FinishedRun, color: str) -> Line:
        epochs = run.column("train", "epoch")
        values = np.maximum(run.column("train", name), LEAST)
        places = thinned(len(values))
        x, y = epochs[places], smoothed(values, places)
        return Line(f"seed {run.seed}: {y[-1]:.3f}", color, x, y, raw=(x, values[places]))

    def finish(axes: Axes) -> None:
        if limit:
            axes.axhline(limit, color="gray", linestyle="--", linewidth=0.8)
        log_scale(axes)

    return line_chart(_seeds(study, line), x="epoch", y=what, finish=finish)


def _share(study: Study, name: str) -> str:
    def line(run: FinishedRun, color: str) -> Line:
        y = run.column("test", name)
        end = f"seed {run.seed}: {percent(y[-1])}"
        return Line(end, color, run.column("test", "epoch"), y)

    lines = _seeds(study, line)
    least = 0.5 / len(study.runs[0].result.evaluation.arrays["labels"])

    def finish(axes: Axes) -> None:
        low, high = min(line.y.min() for line in lines), max(line.y.max() for line in lines)
        share_scale(axes, low, high, least=least)

    return line_chart(lines, x="epoch", y=f"test {metric_name(name)}", finish=finish)


def _test_loss(study: Study) -> str:
    def line(run: FinishedRun, color: str) -> Line:
        y = np.maximum(run.column("test", "loss"), LEAST)
        return Line(f"seed {run.seed}: {y[-1]:.3f}", color, run.column("test", "epoch"), y)

    return line_chart(_seeds(study, line), x="epoch", y="test loss", finish=log_scale)


def _learning_rate(study: Study) -> str:
    """Of the longest run: all follow the same plan."""
    run = max(study.runs, key=lambda run: run.result.steps)
    places = thinned(len(run.column("train", "step")))
    x, y = (run.column("train", name)[places] for name in ("epoch", "learning_rate"))
    line = Line(f"{y[-1]:.2g}", BLUE, x, y)

    def finish(axes: Axes) -> None:
        from_zero(axes, spell=significant)

    return line_chart([line], x="epoch", y="learning rate", finish=finish)


def _seeds(study: Study, line: Callable[[FinishedRun, str], Line]) -> list[Line]:
    return [line(run, series(i)) for i, run in enumerate(study.runs)]
