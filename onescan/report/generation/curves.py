"""What guidance changes: distances, precision and recall, and how clearly classes are told."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from onescan.evaluation.generation import GenerationScores
from onescan.report.chart import chart, label_ends
from onescan.report.palette import series
from onescan.report.section import Figure, Section
from onescan.report.words import percent

CLASSES = "How clearly classes are told"


def curves(scores: GenerationScores) -> list[Section]:
    """A section where there are several scales, else none."""
    if len(scores.scores) <= 1:
        return []
    names = scores.short_names
    figures = [
        Figure(
            names["distance"],
            _chart(scores, ["distance"]),
            "Against guidance; the lower, the better. With more guidance images become clearer and "
            "more alike, so that the curve has a lowest point.",
        )
    ]
    if _values(scores, "precision") is not None:
        figures.append(
            Figure(
                "Precision and recall",
                _chart(scores, ["precision", "recall"]),
                "The share of the images that look real, and the share of the real images that are "
                "covered. Guidance mostly buys the one with the other.",
            )
        )
    if _values(scores, "as_asked") is not None:
        caption = "The share of the images that the classifier tells to be of the class asked for."
        figures.append(Figure(CLASSES, _chart(scores, ["as_asked"]), caption))
    elif _values(scores, "class_score") is not None:
        caption = f"{names['class_score']}; bars: its spread over ten parts of the images."
        figures.append(Figure(CLASSES, _chart(scores, ["class_score"]), caption))
    return [Section("Over guidance", tuple(figures))]


def _values(scores: GenerationScores, field: str) -> list[float] | None:
    """A number at each scale; None where one is missing."""
    values = [getattr(score, field) for score in scores.scores]
    return None if None in values else values


def _chart(scores: GenerationScores, fields: list[str]) -> str:
    scales = [score.guidance or 0.0 for score in scores.scores]
    lines = {field: _values(scores, field) or [] for field in fields}
    are_shares = fields[0] not in ("distance", "class_score")
    beside = scores.short_names[fields[0]] if len(fields) == 1 else "share of images"

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="guidance", ylabel=beside)
        for place, (field, values) in enumerate(lines.items()):
            axes.plot(scales, values, color=series(place), marker="o", markersize=4, clip_on=False)
            if field == "class_score":
                spreads = [score.class_score_spread or 0.0 for score in scores.scores]
                axes.errorbar(scales, values, spreads, color=series(place), capsize=3)
        _scale(axes, scales, are_shares=are_shares)
        if len(lines) > 1:
            ends = enumerate(lines.items())
            label_ends(axes, [(scales[-1], y[-1], name, series(i)) for i, (name, y) in ends])

    told = "; ".join(
        f"{field} " + ", ".join(f"{y:.3g} at {x:g}" for x, y in zip(scales, values, strict=True))
        for field, values in lines.items()
    )
    return chart(draw, alt=f"Line chart over guidance: {told}")


def _scale(axes: Axes, scales: list[float], *, are_shares: bool) -> None:
    axes.set_xticks(scales, [f"{scale:g}" for scale in scales])
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if are_shares:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda share, _: percent(share, 0))
