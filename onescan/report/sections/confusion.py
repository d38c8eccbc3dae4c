"""What is taken for what: every pair of a few classes, or the most confused of many."""

from html import escape
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from onescan.report.palette import BLUE, VERMILION, tint
from onescan.report.pictures import held_out_labels
from onescan.report.runs import RunGroup
from onescan.report.section import Figure, Section
from onescan.report.sections.class_accuracy import class_accuracy
from onescan.report.words import TIMES, percent, plural

MOST_CLASSES = 30  # in a matrix; beyond that the most frequent confusions are listed
NARROW = 14  # classes whose matrix leaves room beside it
MOST_PAIRS = 20
SHORT = 4  # letters of a name that fit above a column

Counts = Int[np.ndarray, "truth prediction"]


class Pair(NamedTuple):
    """A true class, what it was taken for, and how often."""

    shown: int
    said: int
    times: int


def section(study: RunGroup) -> Section:
    """What is confused, all seeds together, and the accuracy of each class."""
    images = held_out_labels(study).numel()
    over = f"{plural(len(study.runs), 'seed')} {TIMES} {plural(images, 'test image')}"
    few = len(study.class_names) <= MOST_CLASSES
    confusions = _matrix(study, over) if few else _pairs(study, over)
    return Section("What is taken for what", (confusions, *class_accuracy(study)))


def most_confused(study: RunGroup) -> list[Pair]:
    """Every pair of classes that was ever confused, the most frequent first."""
    labels, classes = held_out_labels(study), len(study.class_names)
    predictions = study.array("predictions")  # seeds images
    cells = (labels * classes + predictions)[predictions != labels]
    found, times = cells.unique(return_counts=True)  # a matrix of many classes is nearly empty
    order = times.argsort(descending=True, stable=True)
    pairs = zip(found[order].tolist(), times[order].tolist(), strict=True)
    return [Pair(cell // classes, cell % classes, count) for cell, count in pairs]


def _matrix(study: RunGroup, over: str) -> Figure:
    names, labels = study.class_names, held_out_labels(study)
    counts = np.zeros((len(names), len(names)), dtype=int)
    for pair in most_confused(study):
        counts[pair.shown, pair.said] = pair.times
    most = max(int(counts.max()), 1)
    shown = np.bincount(labels.numpy(), minlength=len(names)) * len(study.runs)
    np.fill_diagonal(counts, shown - counts.sum(axis=1))
    return Figure(
        "Confusion matrix",
        _table(counts, most, names),
        f"Rows: what an image shows; columns: what the model says ({over}). Blue cells are "
        "right; in the others, the mistakes, a darker cell is a more frequent mistake.",
        columns=2 if len(names) <= NARROW else 3,
    )


def _table(counts: Counts, most: int, names: tuple[str, ...]) -> str:
    heads = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    rows = [f'<tr><td class="corner">shown \\ said</td>{heads}</tr>']
    for i, name in enumerate(names):
        cells = "".join(_cell(int(n), most, right=i == j) for j, n in enumerate(counts[i]))
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    kinds = ["confusion"]
    kinds += ["upright"] if max(map(len, names)) > SHORT else []
    kinds += ["dense"] if len(names) > NARROW else []
    return f'<div class="scroll"><table class="{" ".join(kinds)}">{"".join(rows)}</table></div>'


def _cell(count: int, most: int, *, right: bool) -> str:
    if right:
        return f'<td style="background:{tint(BLUE, 0.18)}">{count}</td>'
    if not count:
        return '<td class="none">0</td>'
    strength = 0.2 + 0.8 * count / most
    ink = "#fff" if strength > 0.7 else "inherit"  # noqa: PLR2004 - legible on the tint
    return f'<td style="background:{tint(VERMILION, strength)};color:{ink}">{count}</td>'


def _pairs(study: RunGroup, over: str) -> Figure:
    names, found = study.class_names, most_confused(study)
    images = held_out_labels(study).bincount(minlength=len(names)) * len(study.runs)
    rows = ["<tr><th>shown</th><th>said</th><th>times</th><th>of the class</th></tr>"]
    for shown, said, times in found[:MOST_PAIRS]:
        share = times / int(images[shown])
        rows.append(
            f"<tr><td>{escape(names[shown])}</td><td>{escape(names[said])}</td><td>{times}</td>"
            f'<td class="bar" style="--share:{share:.1%}">{percent(share)}</td></tr>'
        )
    return Figure(
        "Most frequent confusions",
        f'<div class="scroll"><table class="pairs">{"".join(rows)}</table></div>',
        f"What the model most often takes for what ({over}), and the share of the shown class' "
        f"images that this is; both directions count apart. {plural(len(found), 'pair')} of "
        f"classes were confused at least once; {len(found[:MOST_PAIRS])} are listed.",
        columns=3,
    )
