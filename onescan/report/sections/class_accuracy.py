"""How well each class is known: all of a few, or the hardest and the easiest of many."""

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure as Drawing

from onescan.report.chart import chart
from onescan.report.palette import BLUE, INK, MUTED
from onescan.report.pictures import held_out_labels
from onescan.report.runs import RunGroup
from onescan.report.section import Figure
from onescan.report.words import label, percent

MOST_BARS = 30  # beyond that the hardest and the easiest are shown, and all as one line
ENDS = 15
ROW = 24  # CSS pixels

Accuracies = Float[np.ndarray, "seeds classes"]
Order = Int[np.ndarray, " some"]  # classes, as their places among all


def class_accuracy(study: RunGroup) -> tuple[Figure, ...]:
    """Accuracy class by class, the lowest first; classes that no image shows are left out."""
    accuracies = accuracy_by_class(study)
    known = np.flatnonzero(np.isfinite(accuracies[0]))
    order = known[np.argsort(accuracies.mean(axis=0)[known], kind="stable")]
    if len(order) <= MOST_BARS:
        return (
            _dots(
                study,
                accuracies,
                order,
                "Accuracy of each class",
                "Classes, the hardest at the top",
            ),
        )
    hardest, easiest = order[:ENDS], order[::-1][:ENDS]
    return (
        _sorted(accuracies, order),
        _dots(
            study,
            accuracies,
            hardest,
            "Hardest classes",
            f"The {ENDS} with the lowest accuracy, lowest first",
        ),
        _dots(
            study,
            accuracies,
            easiest,
            "Easiest classes",
            f"The {ENDS} with the highest accuracy, highest first",
        ),
    )


def accuracy_by_class(study: RunGroup) -> Accuracies:
    """Share of each class' images that are told, run by run; NaN where there are none."""
    labels, classes = held_out_labels(study).numpy(), len(study.class_names)
    shown = np.bincount(labels, minlength=classes)
    predictions = study.array("predictions").numpy()  # seeds images
    right = np.stack([np.bincount(labels[row == labels], minlength=classes) for row in predictions])
    return np.where(shown > 0, right / np.maximum(shown, 1), np.nan)


def _dots(
    study: RunGroup, accuracies: Accuracies, classes: Order, title: str, which: str
) -> Figure:
    mean = accuracies.mean(axis=0)
    names = study.class_names

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="accuracy")
        places = np.arange(len(classes))
        for seed in accuracies:
            axes.plot(
                seed[classes], places, ".", color=BLUE, alpha=0.35, markersize=7, clip_on=False
            )
        axes.plot(mean[classes], places, "o", color=BLUE, markersize=6, clip_on=False)
        for place, index in zip(places, classes, strict=True):
            axes.annotate(
                percent(mean[index]), (1.05, place), xycoords=("axes fraction", "data"), va="center"
            )
        axes.set_yticks(places, [label(names[i]) for i in classes])
        axes.set_ylim(len(classes) - 0.5, -0.5)
        axes.set_xlim(right=1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    told = ", ".join(f"{names[i]} {percent(mean[i])}" for i in classes)
    dots = "small dots: single seeds; large: their mean" if len(accuracies) > 1 else "one seed"
    return Figure(
        title,
        chart(draw, alt=f"Dot chart: {title.lower()}: {told}", height=90 + ROW * len(classes)),
        f"{which} ({dots}). The axis ends at 100%, and begins where the dots do.",
    )


def _sorted(accuracies: Accuracies, order: Order) -> Figure:
    mean = accuracies.mean(axis=0)[order]
    ranks = np.arange(1, len(order) + 1)
    low, middle, high = (percent(share, 0) for share in np.quantile(mean, (0.1, 0.5, 0.9)))

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="classes, hardest first", ylabel="accuracy", ylim=(0, 1))
        axes.fill_between(ranks, mean, color=BLUE, alpha=0.15, linewidth=0)
        axes.plot(ranks, mean, color=BLUE)
        axes.axhline(float(np.median(mean)), color=INK, linestyle=(0, (3, 2)), linewidth=0.8)
        axes.text(ranks[0], float(np.median(mean)) + 0.02, f" median {middle}", color=MUTED)
        axes.set_xlim(1, len(order))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return Figure(
        "Accuracy of every class",
        chart(draw, alt=f"Line chart of the accuracy of {len(order)} classes; median {middle}"),
        f"All {len(order):,} classes in the order of their accuracy (mean over seeds). One class "
        f"in ten is at {low} or below, one in ten at {high} or above. A steep left end means that "
        "a few classes make most of the mistakes.",
    )
