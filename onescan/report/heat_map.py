"""Heat maps of numbers over two things: a cell for each, with the number written in it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure as Drawing

from onescan.report.chart import chart
from onescan.report.palette import BLUE, DIVERGING, INK

CELL, ROW, AROUND = 52, 30, 62  # CSS pixels: a cell's width and height; for what surrounds them
DARK = 0.45  # brightness below which white letters are legible
PURE = 1.5  # the last third of the colours is darker than their names
BRIGHTNESS = np.array([0.299, 0.587, 0.114])  # of red, green and blue

Cells = Float[np.ndarray, "rows columns"]


class Axis(NamedTuple):
    """What lies along a side of a heat map.

    Attributes:
        title: of the axis.
        names: of its cells, in order.
    """

    title: str
    names: list[str]


class Shades(NamedTuple):
    """How a number becomes a colour.

    Attributes:
        colors: from the lowest number to the highest.
        low: what is lower counts as this.
        high: what is higher counts as this.
    """

    colors: Colormap
    low: float
    high: float


SHARES = Shades(LinearSegmentedColormap.from_list("white to blue", ["#ffffff", BLUE]), 0, 1)


def around_zero(cells: Cells) -> Shades:
    """White at 0, blue below it, vermilion above, pure at the cell that is furthest from 0."""
    furthest = float(np.nanmax(np.abs(cells), initial=0)) or 1.0
    return Shades(DIVERGING, -PURE * furthest, PURE * furthest)


def heat_map(
    cells: Cells,
    *,
    down: Axis,
    along: Axis,
    shades: Shades,
    spell: Callable[[float], str],
    alt: str,
) -> str:
    """Draw a grid, its first row on top; a cell that is NaN stays empty.

    Args:
        cells: the numbers.
        down: of the rows.
        along: of the columns.
        shades: how they are coloured.
        spell: writes a number.
        alt: what is seen, for readers who cannot see it.
    """

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel=along.title, ylabel=down.title)
        norm = Normalize(shades.low, shades.high, clip=True)
        shown = np.ma.masked_invalid(cells)
        axes.pcolormesh(shown, cmap=shades.colors, norm=norm, edgecolors="white", linewidth=1.5)
        for (row, column), number in np.ndenumerate(cells):
            if np.isfinite(number):
                color = shades.colors(norm(number))[:3]
                ink = "white" if np.dot(color, BRIGHTNESS) < DARK else INK
                text = spell(float(number))
                axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink)
        axes.set_xticks(np.arange(len(along.names)) + 0.5, along.names)
        axes.set_yticks(np.arange(len(down.names)) + 0.5, down.names)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)

    rows, columns = cells.shape
    width = max(374, AROUND + CELL * columns)
    return chart(draw, alt=alt, width=width, height=AROUND + ROW * max(rows, 4))
