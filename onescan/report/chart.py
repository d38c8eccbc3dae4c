"""Charts: what a function draws with matplotlib, as an image inside the page.

The figure is made without pyplot, and under settings of its own, so neither a user's style nor
a user's open figures come in or change.
"""

import io
import warnings
from base64 import b64encode
from collections.abc import Callable
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onescan.report.palette import GRID, INK, MUTED

PIXELS_PER_INCH = 96  # of a CSS pixel
STYLE: dict[Any, Any] = {
    "font.sans-serif": ["system-ui", "Segoe UI", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 8.5,
    "text.parse_math": False,  # class names may hold dollar signs
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "image.interpolation": "none",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "onescan",  # the same runs give the same page
    "figure.constrained_layout.w_pad": 0.1,  # a browser's font may be wider than matplotlib's
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def chart(
    draw: Callable[[Figure], object],
    *,
    alt: str,
    width: int | float = 374,
    height: int | float = 270,
) -> str:
    """Let `draw` fill a figure, and return it as an `<img>` that needs no other file.

    Args:
        draw: adds axes to the figure and draws on them.
        alt: what is seen, for readers who cannot see it.
        width: in CSS pixels, where the page has room.
        height: in CSS pixels.
    """
    svg = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # the browser has fonts for what matplotlib's lacks
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        size = width / PIXELS_PER_INCH, height / PIXELS_PER_INCH
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(svg, format="svg", metadata=NO_METADATA)
    picture = svg.getvalue().replace(b"'system-ui'", b"system-ui")  # a keyword, not a font's name
    data = b64encode(picture).decode()
    return f'<img class="chart" alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def label_ends(axes: Axes, ends: list[tuple[float, float, str, str]], *, gap: float = 0.07) -> None:
    """Write each line's name beside its end, moved apart where ends lie close.

    Args:
        axes: with its limits final.
        ends: x, y, name and colour of each line's end.
        gap: least distance of two names, as a part of the axis.
    """
    to_part = (axes.transScale + axes.transLimits).transform
    heights = [float(to_part((x, y))[1]) for x, y, _, _ in ends]
    order = sorted(range(len(ends)), key=heights.__getitem__)
    places = _apart([heights[i] for i in order], gap)
    for i, place in zip(order, places, strict=True):
        _, _, name, color = ends[i]
        axes.text(1.03, place, name, color=color, transform=axes.transAxes, va="center")


def _apart(heights: list[float], gap: float) -> list[float]:
    """Move rising heights apart, upwards first, and then down from the top.

    >>> _apart([0.2, 0.2, 1.0], 0.1), _apart([0.9, 1.0, 1.0], 0.25)
    ([0.2, 0.30000000000000004, 1.0], [0.5, 0.75, 1.0])
    """
    places = heights[:1]
    for height in heights[1:]:
        places.append(max(height, places[-1] + gap))
    highest = [1 - gap * rank for rank in reversed(range(len(places)))]
    return [min(place, most) for place, most in zip(places, highest, strict=True)]
