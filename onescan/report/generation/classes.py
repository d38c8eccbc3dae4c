"""Whether images are of the class that was asked for, as a classifier tells."""

from html import escape

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure as Drawing

from onescan.evaluation.generation import GenerationScore, GenerationScores
from onescan.report.chart import chart
from onescan.report.generation.words import best
from onescan.report.palette import BLUE, MUTED, VERMILION, tint
from onescan.report.section import Figure, Section
from onescan.report.words import label, percent

NARROW = 14  # classes whose matrix leaves room beside it
SHORT = 4  # letters of a name that fit above a column
FAINTEST, STRONGEST = 0.12, 0.6  # of the colours behind black letters
MOST_BARS, ENDS = 30, 15  # beyond that many the ends alone
ROW = 22  # CSS pixels

Each = Int[np.ndarray, " classes"]
Counts = Int[np.ndarray, "asked told"]
Shares = Float[np.ndarray, " classes"]
Order = Int[np.ndarray, " some"]


def classes(scores: GenerationScores) -> list[Section]:
    """A section of the best guidance scale, where classes were asked for and told; else none."""
    score = best(scores)
    if not score.asked:
        return []
    figures = list(_bars(scores, np.array(score.asked), np.array(score.right)))
    if score.confusion:
        figures.append(_matrix(scores, np.array(score.confusion)))
    return [Section("Classes asked for, and told", tuple(figures), _lead(scores, score))]


def _lead(scores: GenerationScores, score: GenerationScore) -> str:
    at = "" if score.guidance is None else f" At guidance {score.guidance:g}."
    real = scores.real.as_labelled
    beside = "" if real is None else f" It tells {percent(real)} of the real images aright."
    return f"What the classifier {scores.features} tells of each image.{beside}{at}"


def _bars(scores: GenerationScores, asked: Each, right: Each) -> tuple[Figure, ...]:
    shares = right / np.maximum(asked, 1)
    known = np.flatnonzero(asked)
    order = known[np.argsort(shares[known], kind="stable")]
    if len(order) <= MOST_BARS:
        which = "Share of each class' images that are told to be of it, the lowest at the top."
        return (_bar_chart(scores, shares, order, "As asked, by class", which),)
    lowest, highest = order[:ENDS], order[::-1][:ENDS]
    return (
        _bar_chart(
            scores, shares, lowest, "Seldom as asked", f"The {ENDS} classes with the lowest share."
        ),
        _bar_chart(
            scores, shares, highest, "Mostly as asked", f"The {ENDS} classes with the highest."
        ),
    )


def _bar_chart(
    scores: GenerationScores, shares: Shares, order: Order, title: str, caption: str
) -> Figure:
    names = scores.class_names

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="told as asked", xlim=(0, 1))
        places = np.arange(len(order))
        axes.barh(places, shares[order], color=BLUE, height=0.62)
        for place, share in zip(places, shares[order], strict=True):
            at = (1.02, place)
            axes.annotate(
                percent(float(share), 0),
                at,
                xycoords=("axes fraction", "data"),
                va="center",
                color=MUTED,
            )
        axes.set_yticks(places, [label(names[i]) for i in order])
        axes.set_ylim(len(order) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")

    told = ", ".join(f"{names[i]} {percent(float(shares[i]), 0)}" for i in order)
    html = chart(draw, alt=f"Bar chart: {title.lower()}: {told}", height=80 + ROW * len(order))
    return Figure(title, html, caption)


def _matrix(scores: GenerationScores, counts: Counts) -> Figure:
    names = scores.class_names
    heads = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    rows = [f'<tr><td class="corner">asked for \\ told</td>{heads}</tr>']
    for place, (name, row) in enumerate(zip(names, counts, strict=True)):
        cells = "".join(_cell(row, told, right=told == place) for told in range(len(names)))
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    kinds = ["confusion"]
    kinds += ["upright"] if max(map(len, names)) > SHORT else []
    kinds += ["dense"] if len(names) > NARROW else []
    return Figure(
        "Asked for, and told",
        f'<div class="scroll"><table class="{" ".join(kinds)}">{"".join(rows)}</table></div>',
        "Rows: the class asked for; columns: what the classifier tells, in percent of the row. "
        "Blue cells are as asked; in the others, a darker cell is a more frequent mistake.",
        columns=2 if len(names) <= NARROW else 3,
    )


def _cell(row: Int[np.ndarray, " told"], told: int, *, right: bool) -> str:
    if not row[told]:
        return '<td class="none">0</td>'
    share = row[told] / row.sum()
    color = tint(BLUE if right else VERMILION, FAINTEST + (STRONGEST - FAINTEST) * float(share))
    return f'<td style="background: {color}">{_in_percent(float(share))}</td>'


def _in_percent(share: float) -> str:
    """Whole numbers; less than half a percent is not nothing.

    >>> _in_percent(0.004), _in_percent(0.996), _in_percent(1.0)
    ('&lt;1', '99', '100')
    """
    percents = round(100 * share)
    if not percents:
        return "&lt;1"
    return str(min(percents, 99) if share < 1 else 100)
