"""Curves over lengths, and over the places of the longest rows."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator, NullLocator

from onescan.evaluation.lengths import LengthScores, PlaceScore
from onescan.report.chart import chart
from onescan.report.palette import MUTED, series
from onescan.report.section import Figure, Section
from onescan.report.words import percent

MOST_TICKS = 8
LENGTH, READ = "tokens of a row", "tokens of a row read"
MARKED = "The dashed line is the length of rows in training."


def pictures(scores: LengthScores) -> Section:
    """The main measure over lengths, and what explains it."""
    lengths = [float(score.length) for score in scores.scores]
    marked = f" {MARKED}" if scores.trained_length else ""
    if not scores.is_causal:
        accuracies = [score.accuracy for score in scores.scores]
        over_accuracies = Figure(
            "Accuracy",
            _curve(scores, lengths, accuracies, LENGTH, "accuracy"),
            f"The share of masked tokens for which the likeliest guess is right.{marked}",
        )
        losses = [score.loss for score in scores.scores]
        over_losses = Figure(
            "Loss",
            _curve(scores, lengths, losses, LENGTH, "nats per token"),
            f"Of the masked tokens; the lower, the better.{marked}",
        )
        return Section("Over lengths", (over_accuracies, over_losses))
    perplexities = [score.perplexity for score in scores.scores]
    over_perplexities = Figure(
        "Perplexity",
        _curve(scores, lengths, perplexities, LENGTH, "perplexity"),
        f"Of all tokens of the rows; the lower, the better.{marked}",
    )
    places = _places(scores)
    read = [float(place.end) for place in places]
    by_place = Figure(
        "What context gives",
        _curve(scores, read, [place.loss for place in places], READ, "nats per token"),
        "By how much of a row was read before a token: more than at the dot before, up to as much "
        "as at the dot; in the shortest rows that are long enough, as there are most of those. "
        f"Where rows are few, it also tells which text stands there.{marked}",
    )
    return Section("Over lengths", (over_perplexities, by_place))


def _places(scores: LengthScores) -> list[PlaceScore]:
    """Every place of the longest rows, of the shortest rows that have it."""
    known = {
        (place.begin, place.end): place
        for score in reversed(scores.scores)
        for place in score.places
    }
    longest = scores.scores[-1].places
    return [known[place.begin, place.end] for place in longest]


def _curve(scores: LengthScores, x: list[float], y: list[float], below: str, beside: str) -> str:
    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel=below, ylabel=beside)
        axes.plot(x, y, color=series(0), marker="o", markersize=3.5)
        if scores.trained_length:
            axes.axvline(scores.trained_length, color=MUTED, linestyle="--", linewidth=1)
        _scales(axes, x, is_share=beside == "accuracy")

    return chart(draw, alt=f"Line chart of {beside} over {below}, from {y[0]:.3g} to {y[-1]:.3g}")


def _scales(axes: Axes, x: list[float], *, is_share: bool) -> None:
    """Twice as many tokens are one step along the logarithmic axis."""
    axes.set_xscale("log", base=2)
    every = -(-len(x) // MOST_TICKS)
    shown = x[::-1][::every]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if is_share:
        axes.yaxis.set_major_formatter(lambda share, _: percent(share))
