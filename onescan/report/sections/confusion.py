"""What is taken for what, and how well each class is known."""

from html import escape

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure as Drawing

from onescan.report.chart import chart
from onescan.report.palette import BLUE, VERMILION, tint
from onescan.report.pictures import held_out_labels
from onescan.report.section import Figure, Section
from onescan.report.study import Study
from onescan.report.words import TIMES, label, percent, plural

MOST_CLASSES = 20  # in a matrix; beyond that the most frequent confusions are listed
MOST_PAIRS = 20
SHORT = 4  # letters of a name that fit above a column
MOST_BARS = 30

Counts = Int[np.ndarray, "truth prediction"]


def section(study: Study) -> Section:
    """The confusion matrix, all seeds together, and the accuracy of each class."""
    counts = confusion_counts(study)
    over = f"{plural(len(study.runs), 'seed')} {TIMES} {plural(int(counts[0].sum()), 'test image')}"
    names = study.class_names
    total = counts.sum(axis=0)
    if len(names) <= MOST_CLASSES:
        matrix = Figure(
            "Confusion matrix",
            _matrix(total, names),
            f"Rows: what an image shows; columns: what the model says ({over}). Blue cells are "
            "right; in the others, the mistakes, a darker cell is a more frequent mistake.",
            columns=2,
        )
    else:
        matrix = Figure(
            "Most frequent confusions",
            _pairs(total, names),
            f"What the model most often takes for what ({over}); both directions count apart.",
            columns=2,
        )
    return Section("What is taken for what", (matrix, _per_class(counts, names)))


def confusion_counts(study: Study) -> Int[np.ndarray, "seeds truth prediction"]:
    """Count each pair of true and predicted class, for every run."""
    labels, classes = held_out_labels(study).numpy(), len(study.class_names)
    predictions = study.array("predictions").numpy()
    cells = labels * classes + predictions  # seeds images
    counts = [np.bincount(row, minlength=classes**2) for row in cells]
    return np.stack(counts).reshape(-1, classes, classes)


def _matrix(counts: Counts, names: tuple[str, ...]) -> str:
    most = max(int((counts - np.diag(np.diag(counts))).max()), 1)
    heads = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    rows = [f'<tr><td class="corner">shown \\ said</td>{heads}</tr>']
    for i, name in enumerate(names):
        cells = "".join(_cell(int(n), most, right=i == j) for j, n in enumerate(counts[i]))
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    kind = "confusion upright" if max(map(len, names)) > SHORT else "confusion"
    return f'<div class="scroll"><table class="{kind}">{"".join(rows)}</table></div>'


def _cell(count: int, most: int, *, right: bool) -> str:
    if right:
        return f'<td style="background:{tint(BLUE, 0.18)}">{count}</td>'
    if not count:
        return '<td class="none">0</td>'
    strength = 0.2 + 0.8 * count / most
    ink = "#fff" if strength > 0.7 else "inherit"  # noqa: PLR2004 - legible on the tint
    return f'<td style="background:{tint(VERMILION, strength)};color:{ink}">{count}</td>'


def _pairs(counts: Counts, names: tuple[str, ...]) -> str:
    wrong = counts - np.diag(np.diag(counts))
    rows = ["<tr><th>shown</th><th>said</th><th>times</th><th>of the class</th></tr>"]
    for cell in np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]:
        i, j = divmod(int(cell), len(names))
        if wrong[i, j]:
            share = percent(wrong[i, j] / counts[i].sum())
            rows.append(
                f"<tr><td>{escape(names[i])}</td><td>{escape(names[j])}</td>"
                f"<td>{wrong[i, j]}</td><td>{share}</td></tr>"
            )
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _per_class(counts: Int[np.ndarray, "seeds truth prediction"], names: tuple[str, ...]) -> Figure:
    per_seed = _class_accuracy(counts)
    mean = per_seed.mean(axis=0)
    known = np.flatnonzero(np.isfinite(mean))
    lowest = known[np.argsort(mean[known], kind="stable")][:MOST_BARS]

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="accuracy")
        places = np.arange(len(lowest))
        for seed in per_seed:
            axes.plot(
                seed[lowest], places, ".", color=BLUE, alpha=0.35, markersize=7, clip_on=False
            )
        axes.plot(mean[lowest], places, "o", color=BLUE, markersize=6, clip_on=False)
        for place, index in zip(places, lowest, strict=True):
            axes.annotate(
                percent(mean[index]), (1.05, place), xycoords=("axes fraction", "data"), va="center"
            )
        axes.set_yticks(places, [label(names[i]) for i in lowest])
        axes.set_ylim(len(lowest) - 0.5, -0.5)
        axes.set_xlim(right=1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    which = (
        f"The {len(lowest)} classes with the lowest accuracy"
        if len(lowest) < len(known)
        else "Classes"
    )
    alt = "Dot chart of the accuracy of each class, lowest first: " + ", ".join(
        f"{names[i]} {percent(mean[i])}" for i in lowest
    )
    dots = "small dots: single seeds; large: their mean" if len(per_seed) > 1 else "one seed"
    return Figure(
        "Accuracy of each class",
        chart(draw, alt=alt, height=90 + 24 * len(lowest)),
        f"{which}, the hardest at the top ({dots}). The axis ends at 100%, and begins where the "
        "dots do.",
    )


def _class_accuracy(
    counts: Int[np.ndarray, "seeds truth prediction"],
) -> Float[np.ndarray, "seeds truth"]:
    """NaN for a class that no held-out image shows."""
    shown = counts.sum(axis=2)
    right = counts.diagonal(axis1=1, axis2=2)
    return np.where(shown > 0, right / np.maximum(shown, 1), np.nan)
