"""Charts as inline SVG in one style, heat maps as tables, and small images.

Charts are drawn with the colors of light mode, which are then replaced by CSS variables, so that
they follow the reader's light or dark mode. Their text keeps the font and size of the page.
"""

import io
import re
import warnings
from base64 import b64encode
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Literal, NamedTuple
from zlib import crc32

import matplotlib
import numpy as np
from jaxtyping import Float, Int, Num, UInt8
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from onescan.experiments.report.format import label, percent, significant
from onescan.experiments.report.page import COLORS, Figure, fragment

INK, MUTED, GRID, SURFACE, *_ = [light for light, _ in COLORS.values()]
SERIES = [light for light, _ in list(COLORS.values())[4:]]
BLUE, VERMILION = SERIES[:2]
COOL, WARM = np.array([(0.1, 0.52, 0.78), (0.89, 0.44, 0.08)])  # of pixels, in both modes
WIDTH, HEIGHT = 374, 270  # CSS pixels of a chart in one of the page's three columns
WIDE = 1120  # CSS pixels of all three columns
PIXELS_PER_INCH = 96  # of CSS pixels
STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "text.parse_math": False,  # names may contain dollar signs
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": MUTED,
    "axes.titlesize": 8.5,
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
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "onescan",  # equal runs give equal pages
    "figure.constrained_layout.w_pad": 0.1,  # the browser's font may be wider than matplotlib's
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
DASHED = (0, (3, 2))

MAX_POINTS = 600  # of a curve
MAX_LABELS = 8  # lines beyond that have no labels
NEAR_EDGE = 0.85  # labels of lines that end beyond this part of the width are in the margin
WINDOWS = 40  # the running mean spans this fraction of a run
SMALLEST = 1e-6  # substitute for 0 on a logarithmic axis
NARROW_RANGE = 3  # values within this factor get a linear axis
STEPS = (1, 2, 2.5, 5, 10)  # between ticks, times a power of ten
ROW = 24  # CSS pixels of a row of dots
SHARES = (0.0, 0.3, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0)
LONGEST_SIDE = 112  # pixels: larger images are shrunk
COARSE = 48  # pixels: smaller images are enlarged to crisp squares

Column = Float[np.ndarray, " _"]
Cells = Float[np.ndarray, "rows columns"]
Scale = Literal["linear", "zero", "log", "share"]


def to_svg(
    draw: Callable[[Axes], object],
    *,
    description: str,
    width: int | float = WIDTH,
    height: int | float = HEIGHT,
) -> Markup:
    """Draw a chart, and return it as an inline `<svg>`.

    Neither the user's matplotlib style nor open figures have an effect or are changed.

    Args:
        draw: Draws on the axes.
        description: What the chart shows, for screen readers.
        width: Width in CSS pixels; the chart shrinks on narrower screens.
        height: Height in CSS pixels.
    """
    file = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has fonts for characters that are missing in matplotlib's.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        size = width / PIXELS_PER_INCH, height / PIXELS_PER_INCH
        figure = Drawing(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(file, format="svg", metadata={"Date": None})
    return _inline(file.getvalue(), description, width)


def _inline(svg: str, description: str, width: int | float) -> Markup:
    """Turn matplotlib's SVG file into an element of a page."""
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box
    body = svg[svg.index("</defs>") + len("</defs>") :]  # after the style sheet
    prefix = f"f{crc32(body.encode()):x}"
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body)  # unique within the page
    body = re.sub(r"font-family: [^;]*; ?", "", body)
    for name, (light, _) in COLORS.items():
        body = body.replace(light, f"var(--{name})")
    opening = (
        f'<svg class="chart" role="img" aria-label="{escape(description)}" {box[0]} '
        f'style="max-width:{width:.0f}px;--natural:{width:.0f}px">'
    )
    return Markup(opening + body)  # matplotlib escapes text


# Line charts


class Line(NamedTuple):
    """One curve of a chart.

    Attributes:
        name: Name, written at its end unless it is empty.
        color: Color of the line and its name.
        x: Increasing positions.
        y: Values at these positions.
        raw: Values before smoothing at the same `x`, drawn faintly.
        band: Lower and upper bounds at the same `x`.
        style: Line style of matplotlib.
        width: Line width in points.
        alpha: Opacity.
        dots: Whether points are marked; single points always are.
    """

    name: str
    color: str
    x: Num[np.ndarray, " _"]
    y: Column
    raw: Column | None = None
    band: tuple[Column, Column] | None = None
    style: Any = "-"
    width: int | float = 1.6
    alpha: float = 1.0
    dots: bool = False


def seed_line(
    name: str,
    color: str,
    curves: Sequence[tuple[Column, Column]],
    format: Callable[[float], str],
    style: str = "-",
) -> Line:
    """Average curves of seeds, which have their points at the same steps; some may stop early.

    A band spans the lowest to the highest seed. The last value follows the name.
    """
    shared = min(len(x) for x, _ in curves)
    x = np.mean([x[:shared] for x, _ in curves], axis=0)
    values = np.stack([y[:shared] for _, y in curves])
    mean = values.mean(axis=0)
    band = (values.min(axis=0), values.max(axis=0)) if len(values) > 1 else None
    return Line(f"{name} {format(mean[-1])}", color, x, mean, band=band, style=style)


def line_chart(
    lines: Sequence[Line],
    *,
    x: str,
    y: str,
    scale: Scale = "linear",
    format: Callable[[float], str] = significant,
    format_x: Callable[[float], str] | None = None,
    log_x: bool = False,
    at_least: int | float = 0.0,
    threshold: int | float | None = None,
    mark_x: int | float | None = None,
    limits: tuple[int | float, int | float] | None = None,
    description: str = "",
    width: int = WIDTH,
    height: int = HEIGHT,
) -> Markup:
    """Draw curves, with their names where they end.

    Args:
        lines: At least one line.
        x: Label of the horizontal axis, which contains 0 unless `log_x`.
        y: Label of the vertical axis.
        scale: Scale of the vertical axis: "zero" is linear from 0; "log" becomes linear for values
            within a factor of 3; "share" widens towards 100% if a share exceeds 90%.
        format: Formats the numbers of the vertical axis.
        format_x: Formats the numbers of the horizontal axis.
        log_x: Whether the horizontal axis is logarithmic, with a tick at each point of the first
            line.
        at_least: Minimum upper end of a "zero" axis.
        threshold: Height of a dashed line.
        mark_x: Position of a dashed vertical line.
        limits: Limits of the vertical axis; None chooses them from the values.
        description: What the chart shows, for screen readers; by default its last values.
        width: Width in CSS pixels.
        height: Height in CSS pixels.
    """

    def draw(axes: Axes) -> None:
        for line in lines:
            if line.raw is not None:
                axes.plot(line.x, line.raw, color=line.color, alpha=0.3, linewidth=0.7)
            if line.band:
                axes.fill_between(line.x, *line.band, color=line.color, alpha=0.15, linewidth=0)
        for line in lines:
            (drawn,) = axes.plot(line.x, line.y, color=line.color, linestyle=line.style)
            drawn.set(linewidth=line.width, alpha=line.alpha)
            drawn.set(
                marker="o" if line.dots or len(line.x) == 1 else "", markersize=2.5 * line.width
            )
            drawn.set(clip_on=False, zorder=3)  # fully visible at the edges, too
        if threshold is not None:
            axes.axhline(threshold, color=MUTED, linestyle=DASHED, linewidth=0.8)
        if mark_x is not None:
            axes.axvline(mark_x, color=MUTED, linestyle=DASHED, linewidth=0.8)
        x_note = _scale_x(axes, lines, mark_x, log=log_x)
        if format_x:
            axes.xaxis.set_major_formatter(lambda value, _: format_x(value))
        values = np.concatenate([part for line in lines for part in _parts(line)])
        y_note = _scale_y(axes, values, scale, format, at_least)
        axes.set(xlabel=x + x_note, ylabel=y + y_note)
        if limits:
            axes.set_ylim(limits)
        if len(named) <= MAX_LABELS:
            ends = [(float(line.x[-1]), float(line.y[-1]), line.name, line.color) for line in named]
            label_ends(axes, ends)

    named = [line for line in lines if line.name]
    names = "; ".join(line.name for line in named)
    description = description or f"Line chart of {y} over {x}. Last values: {names}"
    return to_svg(draw, description=description, width=width, height=height)


def line_figure(
    lines: Sequence[Line], caption: str, *, y: str, title: str = "", **chart: Any
) -> Figure:
    """A figure with a line chart, by default titled like its vertical axis; see `line_chart`."""
    return Figure(title or y[:1].upper() + y[1:], line_chart(lines, y=y, **chart), caption)


def _parts(line: Line) -> list[Column]:
    return [line.y, *([] if line.raw is None else [line.raw]), *(line.band or ())]


def _scale_x(axes: Axes, lines: Sequence[Line], mark_x: int | float | None, *, log: bool) -> str:
    """Set the scale and limits of the horizontal axis, and return a note for its label."""
    points = lines[0].x
    if log and len(points) > 1:
        axes.set_xscale("log")
        ticks = points[::-1][:: -(-len(points) // MAX_LABELS)]
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        shown = [*points, mark_x or points[0]]
        axes.set_xlim(0.85 * min(shown), max(shown))
        return " (log scale)"
    first, last = min(line.x[0] for line in lines), max(line.x[-1] for line in lines)
    axes.set_xlim(min(first, 0), last or 1)
    are_whole = all((line.x == np.round(line.x)).all() for line in lines)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS, integer=are_whole))
    return ""


def _scale_y(
    axes: Axes, values: Column, scale: Scale, format: Callable[[float], str], at_least: int | float
) -> str:
    """Set the scale of the vertical axis, and return a note for its label."""
    if scale == "log":
        return log_scale(axes)
    if scale == "share" and values.max() > SHARES[4]:
        return _share_scale(axes, values)
    if scale == "zero":
        axes.set_ylim(0, max(at_least, axes.get_ylim()[1]))
    if scale == "share":
        format = percent_tick
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format(value)))
    return ""


def log_scale(axes: Axes) -> str:
    """Use a logarithmic axis if values differ much, and return a note for its label."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if low <= 0 or high < NARROW_RANGE * low:
        if low == high:
            axes.set_ylim(0, 1.5 * high or 1)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
        return ""
    axes.set_yscale("log")
    if high < 1000 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    return " (log scale)"


def _share_scale(axes: Axes, values: Column) -> str:
    """Widen the axis towards 100%, where curves of accurate models would merge into one."""
    below_one = values[values < 1]
    min_error = (1 - below_one.max()) / 2 if len(below_one) else 1e-3  # smaller ones count as 0

    def stretched(share: ArrayLike) -> NDArray[np.float64]:
        return -np.log10(np.maximum(1 - np.asarray(share, float), min_error))

    shares = np.array([share for share in SHARES if share in (0, 1) or 1 - share > 2 * min_error])
    first = min(np.flatnonzero(shares <= values.min())[-1], len(shares) - 2)
    last = max(np.flatnonzero(shares >= values.max())[0], first + 1)
    ticks = shares[first : last + 1]
    axes.set_yscale("function", functions=(stretched, lambda height: 1 - 10 ** -np.asarray(height)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, [percent_tick(tick) for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])
    return " (log scale of the error)"


def percent_tick(share: float) -> str:
    """Format a share on an axis.

    >>> percent_tick(0.995)
    '99.5%'
    """
    return f"{100 * share:.3g}%"


def label_ends(
    axes: Axes, ends: Sequence[tuple[float, float, str, str]], *, gap: float = 0.07
) -> None:
    """Write the name of each line at its end, and move names apart that are close.

    Lines that almost reach the right edge are labeled in the margin, shorter ones where they stop.

    Args:
        axes: Axes with their final limits.
        ends: x, y, name and color of each line.
        gap: Minimum distance between two names, relative to the height of the axis.
    """
    to_axes = axes.transScale + axes.transLimits
    placed = [(*to_axes.transform((x, y)), name, color) for x, y, name, color in ends]
    placed.sort(key=lambda end: end[1])
    margin = [end for end in placed if end[0] > NEAR_EDGE]
    inside = [end for end in placed if end[0] <= NEAR_EDGE]
    for group in (margin, inside):
        heights = _separate([end[1] for end in group], gap)
        for height, (x, _, name, color) in zip(heights, group, strict=True):
            if group is margin:
                axes.text(1.03, height, name, color=color, transform=axes.transAxes, va="center")
                continue
            axes.annotate(
                name,
                (x, height),
                xycoords="axes fraction",
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                color=color,
                zorder=4,
                bbox={"facecolor": SURFACE, "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )


def _separate(heights: Sequence[float], gap: float) -> list[float]:
    """Move increasing heights apart, first upwards, then down from the top.

    >>> _separate([0.2, 0.2, 1.0], 0.1), _separate([0.9, 1.0, 1.0], 0.25)
    ([0.2, 0.30000000000000004, 1.0], [0.5, 0.75, 1.0])
    """
    positions = list(heights[:1])
    for height in heights[1:]:
        positions.append(max(height, positions[-1] + gap))
    highest = [1 - gap * rank for rank in reversed(range(len(positions)))]
    return [min(pair) for pair in zip(positions, highest, strict=True)]


def series(index: int) -> str:
    """Return the color of the i-th line of a chart."""
    return SERIES[index % len(SERIES)]


def css_color(color: str) -> str:
    """Return the CSS variable that stands for a color, which follows light and dark mode.

    >>> css_color(series(0))
    'var(--blue)'
    """
    return next(f"var(--{name})" for name, (light, _) in COLORS.items() if light == color)


def thinned(count: int) -> Int[np.ndarray, " points"]:
    """Return evenly spaced indices of at most 600 of `count` points, including the last.

    >>> thinned(3), thinned(1201)[[0, -1]]
    (array([0, 1, 2]), array([   0, 1200]))
    """
    every = -(-count // MAX_POINTS)
    return np.arange((count - 1) % every, count, every)


def half_window(count: int) -> int:
    """Return the number of points on each side in a running mean; 0 for short runs."""
    return count // (2 * WINDOWS)


def smoothed(
    y: Column, indices: Int[np.ndarray, " points"], statistic: Callable[[Column], float] = np.mean
) -> Float[np.ndarray, " points"]:
    """Return the running mean, or another statistic, around each index."""
    half = half_window(len(y))
    return np.array([statistic(y[max(i - half, 0) : i + half + 1]) for i in indices])


# Dots and heat maps


def dot_chart(
    names: Sequence[str],
    values: Float[np.ndarray, "seeds rows"],
    *,
    x: str,
    format: Callable[[float], str] = percent,
    format_x: Callable[[float], str] = percent_tick,
    end: int | float = 1.0,
) -> Markup:
    """Draw a row for each name, with a small dot for each seed and a large dot for their mean.

    Args:
        names: Names of the rows, from the top.
        values: Values of each seed; NaN is left out.
        x: Label of the axis.
        format: Formats the mean beside each row.
        format_x: Formats the numbers of the axis.
        end: Right end of the axis.
    """
    mean = np.nanmean(values, axis=0)

    def draw(axes: Axes) -> None:
        rows = np.arange(len(names))
        style: dict[str, Any] = {"linestyle": "", "color": BLUE, "clip_on": False}
        for seed in values if len(values) > 1 else ():
            axes.plot(seed, rows, marker=".", alpha=0.4, markersize=7, **style)
        axes.plot(mean, rows, marker="o", markersize=6, **style)
        for row, value in zip(rows, mean, strict=True):
            axes.annotate(
                format(value), (1.05, row), xycoords=("axes fraction", "data"), va="center"
            )
        axes.set_yticks(rows, [label(name) for name in names])
        axes.set(xlabel=x, ylim=(len(names) - 0.5, -0.5))
        low = float(np.nanmin(values))
        axes.set_xlim(low - 0.06 * (end - low) if low < end else 0.9 * end, end)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda value, _: format_x(value))

    listed = ", ".join(f"{n} {format(v)}" for n, v in zip(names, mean, strict=True))
    description = f"Dot chart of {x}: {listed}"
    return to_svg(draw, description=description, height=64 + ROW * max(len(names), 3))


def positions_in_blocks(
    axes: Axes, values: Float[np.ndarray, "blocks heads"], spread: float
) -> Float[np.ndarray, "blocks heads"]:
    """Prepare a horizontal axis of blocks, and return where on it the value of each head belongs.

    The heads of a block are side by side; with a `spread` of 1, blocks have no gap between them.
    """
    blocks, heads = values.shape
    axes.set(xlabel="block", xlim=(0.5, blocks + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    axes.grid(visible=False, axis="x")
    offsets = (np.arange(heads) + 0.5) / heads - 0.5
    return np.arange(1, blocks + 1)[:, None] + spread * offsets


def matrix(
    colors: Float[np.ndarray, "rows columns rgba"],
    ends: tuple[float, float],
    *,
    x: str,
    y: str = "",
    description: str,
    width: int | float = WIDTH,
    height: int | float = HEIGHT,
) -> Markup:
    """Draw a matrix of colors, with the first row at the top and its last columns at `ends`.

    Rows are counted from 1 if the vertical axis has a label.
    """

    def draw(axes: Axes) -> None:
        extent = (ends[0] - 0.5, ends[1] + 0.5, len(colors) + 0.5, 0.5)
        axes.imshow(colors, extent=extent, aspect="auto")
        axes.set(xlabel=x, ylabel=y)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        rows = MaxNLocator(12, integer=True, min_n_ticks=1) if y else NullLocator()
        axes.yaxis.set_major_locator(rows)
        axes.grid(visible=False)

    return to_svg(draw, description=description, width=width, height=height)


class Axis(NamedTuple):
    """One side of a heat map: its title, and the names of its cells."""

    title: str
    names: Sequence[str]


def heat_map(
    cells: Cells,
    *,
    rows: Axis,
    columns: Axis,
    format: Callable[[float], str],
    diverging: bool = False,
    high: int | float | None = None,
) -> Markup:
    """Return a table with one shaded cell for each number; NaN cells stay empty.

    Args:
        cells: Numbers from 0 to `high`, or of both signs if `diverging`.
        rows: Names of the rows.
        columns: Names of the columns.
        format: Formats the numbers.
        diverging: Whether numbers below 0 are blue and those above are orange; else all are blue.
        high: Number with the full color. Defaults to the largest, or 1 if all are 0.
    """
    limit = high or float(np.nanmax(np.abs(cells), initial=0)) or 1.0
    table = [[_cell(value, limit, format, diverging=diverging) for value in row] for row in cells]
    ends = (-limit, limit) if diverging else (0.0, limit)
    colors = "var(--blue), var(--surface), var(--vermilion)"
    if not diverging:
        colors = "var(--surface), var(--blue)"
    corner = f"{rows.title} \\ {columns.title}"
    cells_table = fragment("cells", table, rows.names, columns.names, corner)
    return cells_table + fragment("legend", format(ends[0]), format(ends[1]), colors)


def _cell(
    value: float, limit: float, format: Callable[[float], str], *, diverging: bool
) -> tuple[str, float, str]:
    """Return the text, strength of the color and CSS classes of a cell."""
    if not np.isfinite(value):
        return "", 0.0, ""
    level = float(min(abs(value) / limit, 1))
    return format(value), level, cell_classes(level, warm=diverging and bool(value > 0))


def cell_classes(level: float, *, warm: bool) -> str:
    """Return the CSS classes of a cell: its color, and whether its text is inverted."""
    applied = {"warm": warm, "strong": level > 0.6, "zero": level == 0}  # noqa: PLR2004
    return " ".join(name for name, applies in applied.items() if applies)


# Images


class Picture(NamedTuple):
    """An image inside the page.

    Attributes:
        uri: A data URI.
        coarse: Whether its pixels are enlarged to crisp squares.
    """

    uri: str
    coarse: bool = False


def picture(
    pixels: UInt8[np.ndarray, "height width channels"], longest: int = LONGEST_SIDE
) -> Picture:
    """Encode an image as PNG, or shrink a larger one and encode it as JPEG."""
    image = Image.fromarray(pixels)
    image.thumbnail((longest, longest))
    coarse = max(image.size) < COARSE
    kind = "png" if image.size == (pixels.shape[1], pixels.shape[0]) else "jpeg"
    file = io.BytesIO()
    image.save(file, format=kind, optimize=True)
    return Picture(f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}", coarse)


def diverging(values: Float[np.ndarray, "*axes"]) -> Float[np.ndarray, "*axes rgba"]:
    """Color values: -1 is blue, 0 transparent and 1 orange, visible in light and dark mode."""
    colors = np.where(values[..., None] < 0, COOL, WARM)
    return np.concatenate([colors, np.abs(values).clip(0, 1)[..., None]], axis=-1)
