"""Line charts of how something went: thinned, so that a long run's curve stays small."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from onescan.report.chart import chart, label_ends
from onescan.report.runs import Column

MOST_POINTS = 600
WINDOWS = 40  # the smoothing window is this part of a run
MOST_LABELS = 8
LEAST = 1e-6  # so that 0 has a place on a logarithmic axis

Points = tuple[Column, Column]
Places = Int[np.ndarray, " points"]


class Line(NamedTuple):
    """One curve.

    Attributes:
        name: what stands at its end.
        color: of the line and its name.
        x: where its points are, rising.
        y: and how high.
        raw: what was smoothed, drawn faintly.
        band: the lowest and the highest of what the line is the mean of.
        style: as matplotlib names it.
    """

    name: str
    color: str
    x: Column
    y: Column
    raw: Points | None = None
    band: tuple[Column, Column] | None = None
    style: str = "-"


def line_chart(lines: list[Line], *, x: str, y: str, finish: Callable[[Axes], object]) -> str:
    """Draw lines, with their names at their ends where there are not too many.

    Args:
        lines: at least one.
        x: what lies along the horizontal axis, which begins at 0.
        y: what lies along the vertical axis.
        finish: sets the vertical axis once all is drawn.
    """

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel=x, ylabel=y)
        for line in lines:
            if line.raw:
                axes.plot(*line.raw, color=line.color, alpha=0.22, linewidth=0.7)
            if line.band:
                axes.fill_between(line.x, *line.band, color=line.color, alpha=0.15, linewidth=0)
        for line in lines:
            (drawn,) = axes.plot(line.x, line.y, color=line.color, linestyle=line.style)
            drawn.set_marker("." if len(line.x) == 1 else "")
            drawn.set(clip_on=False, zorder=3)  # whole, and seen, at 0% and 100% too
        axes.set_xlim(0, max(line.x[-1] for line in lines))
        finish(axes)
        if len(lines) <= MOST_LABELS:
            label_ends(axes, [(line.x[-1], line.y[-1], line.name, line.color) for line in lines])

    ends = "; ".join(line.name for line in lines)
    return chart(draw, alt=f"Line chart of the {y} over the {x}, which ends at: {ends}")


def thinned(count: int) -> Places:
    """The places of every n-th of many points; the last is kept.

    >>> thinned(3), thinned(1201)[[0, -1]]
    (array([0, 1, 2]), array([   0, 1200]))
    """
    every = -(-count // MOST_POINTS)
    return np.arange((count - 1) % every, count, every)


def smoothed(
    y: Column, places: Places, statistic: Callable[[Column], float] = np.mean
) -> Float[np.ndarray, " points"]:
    """The mean, or another statistic, of what is around each place.

    Near the ends it is of what there is of the window.
    """
    half = len(y) // (2 * WINDOWS)
    return np.array([statistic(y[max(i - half, 0) : i + half + 1]) for i in places])
