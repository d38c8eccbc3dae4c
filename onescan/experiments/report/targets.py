"""Sections about predicted values and labels: scatter plots, and a table per value or label."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from jaxtyping import Float
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from onescan.experiments.report.format import label, percent
from onescan.experiments.report.page import Figure, Section, fragment
from onescan.experiments.report.plots import BLUE, DASHED, MUTED, thinned, to_svg
from onescan.experiments.report.runs import RunGroup
from onescan.experiments.tasks.multilabel import label_scores
from onescan.experiments.tasks.regression import ValueScore, value_scores
from onescan.messages import plural

MAX_SCATTERS = 12  # values that are drawn

Column = Float[np.ndarray, " examples"]


def values(group: RunGroup) -> Section:
    """Predicted against true values, and the errors of each value."""
    arrays = [run.result.evaluation.arrays for run in group.runs]
    true, predicted = (arrays[0][name].double().numpy() for name in ("labels", "predictions"))
    names = group.class_names
    figures = [
        Figure(name, _scatter(name, *pair), _scatter_caption(group, len(true)))
        for name, *pair in list(zip(names, true.T, predicted.T, strict=True))[:MAX_SCATTERS]
    ]
    scores = [value_scores(each["labels"], each["predictions"]) for each in arrays]
    last = "of the true values, which is the RMSE of predicting their mean"
    table = errors_table(group, scores, true.std(axis=0), last)
    return Section("Predicted values", [table, *figures], _omitted(len(names)))


def errors_table(
    group: RunGroup, scores: Sequence[Sequence[ValueScore]], std: Iterable[float], last: str
) -> Figure:
    """The errors of each value.

    Args:
        group: The runs.
        scores: The scores of each value, for each run.
        std: Standard deviation of each value.
        last: What it is the standard deviation of.
    """
    rows: list[tuple[object, ...]] = [("value", "R\N{SUPERSCRIPT TWO}", "RMSE", "MAE", "std")]
    for name, deviation, *of_seeds in zip(group.class_names, std, *scores, strict=True):
        errors = (over_seeds(getattr(s, key) for s in of_seeds) for key in ("r2", "rmse", "mae"))
        rows.append((name, *errors, f"{deviation:.4g}"))
    caption = (
        f"Errors on held-out {group.task.unit}, in the units of each value. R\N{SUPERSCRIPT TWO} "
        "is the share of the variance that is explained. The last column is the standard deviation "
        f"{last}.{spread(group)}"
    )
    return Figure("Errors of each value", fragment("table", rows, "numbers lined"), caption, 3)


def labels(group: RunGroup) -> Section:
    """Precision, recall, F1 and average precision of each label."""
    arrays = [run.result.evaluation.arrays for run in group.runs]
    scores = [label_scores(each["labels"], each["predictions"]) for each in arrays]
    columns = ("precision", "recall", "f1", "average_precision")
    rows: list[tuple[object, ...]] = [
        ("label", "support", "precision", "recall", "F1", "average precision")
    ]
    for i, name in enumerate((*group.class_names, "all labels")):
        of_seeds = [(*by_label, total)[i] for by_label, total in scores]
        shares = (
            over_seeds((getattr(score, key) for score in of_seeds), partial(percent, digits=1))
            for key in columns
        )
        rows.append((name, f"{of_seeds[0].support:,}", *shares))
    caption = (
        f"Support is the number of held-out {group.task.unit} that have the label, out of "
        f"{len(arrays[0]['labels']):,}. Precision, recall and F1 are those of labels with a "
        "probability above 50%; average precision is the area under the precision-recall curve. "
        "The last row pools all labels; macro F1 and mean average precision are means over "
        f"labels instead.{spread(group)}"
    )
    figure = Figure("Scores of each label", fragment("table", rows, "numbers lined"), caption, 3)
    return Section("Labels", [figure])


def over_seeds(numbers: Iterable[float], format: Callable[[float], str] = "{:.4g}".format) -> str:
    """Format the mean and, of several seeds, the standard deviation; a dash if it is undefined.

    >>> over_seeds([1.0, 2.0]), over_seeds([math.nan])
    ('1.5 ± 0.7071', '-')
    """
    values = list(numbers)
    if any(map(math.isnan, values)):
        return "-"
    spread = f" \u00b1 {format(statistics.stdev(values))}" if len(values) > 1 else ""
    return format(statistics.mean(values)) + spread


def spread(group: RunGroup) -> str:
    """Return the end of a caption that says what the numbers of several seeds are."""
    return " Numbers are means and standard deviations over seeds." * (len(group.runs) > 1)


def _omitted(count: int) -> str:
    return f"The first {MAX_SCATTERS} of {count} values are drawn." * (count > MAX_SCATTERS)


def _scatter_caption(group: RunGroup, count: int) -> str:
    which = f" of seed {group.runs[0].seed}" * (len(group.runs) > 1)
    shown = len(thinned(count))
    some = f"{shown} of {count:,}" if shown < count else f"{count:,}"
    return (
        f"Predictions{which} for {some} held-out {group.task.unit}. Points on the dashed line are "
        "predicted exactly."
    )


def _scatter(name: str, true: Column, predicted: Column) -> Markup:
    """Draw predicted over true values, at most `MAX_POINTS` of them."""
    chosen = thinned(len(true))
    ends = [min(true.min(), predicted.min()), max(true.max(), predicted.max())]

    def draw(axes: Axes) -> None:
        axes.plot(ends, ends, color=MUTED, linestyle=DASHED, linewidth=0.8)
        axes.plot(true[chosen], predicted[chosen], ".", color=BLUE, alpha=0.5, markeredgewidth=0.0)
        axes.set(xlabel=f"true {label(name)}", ylabel=f"predicted {label(name)}")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_locator(MaxNLocator(5))

    points = plural(len(chosen), "example")
    return to_svg(draw, description=f"Scatter plot of predicted over true {name} of {points}")
