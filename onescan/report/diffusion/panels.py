"""Pictures side by side, one for each line, and the ticks that they have in common."""

from html import escape

from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, MaxNLocator

from onescan.report.diffusion.lines import Line

WIDE = 1120  # CSS pixels: all of the page's columns
NARROW = 320  # CSS pixels: one of them
MOST_TICKS = 12


def panels(lines: list[Line], pictures: list[str], *, width: int = NARROW) -> str:
    """Each line's picture, under its name."""
    each = "".join(
        f"<div>{f'<h4>{escape(line.name)}</h4>' * bool(line.name)}{picture}</div>"
        for line, picture in zip(lines, pictures, strict=True)
    )
    return f'<div class="panels" style="--panel:{width}px">{each}</div>'


def count_blocks(axis: Axis) -> None:
    """Write whole numbers on an axis of blocks, however few there are."""
    axis.set_major_locator(MaxNLocator(MOST_TICKS, integer=True, min_n_ticks=1))


def spell_shares(axis: Axis) -> None:
    """Write the shares on an axis as percentages."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
