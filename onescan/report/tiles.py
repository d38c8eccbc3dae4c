"""Heat maps, alone or laid over images: a column for each map."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Drawing
from torch import Tensor

from onescan.report.chart import chart
from onescan.report.palette import DIVERGING
from onescan.report.words import label

TILE = 46  # CSS pixels
GAP, BELOW = 0.08, 0.3  # between columns and rows, as parts of a tile; numbers stand below
LETTER, AROUND = 6.5, 40  # CSS pixels: of a row's name; for what surrounds the tiles
BAR = 5  # how many times wider than high the colour bar is, for each tile along it
FURTHEST = 4  # the colours end at 4 and at a quarter
SHADE = 0.35  # how far an image may darken a colour
ON_BLACK = 0.25  # images with a darker median shade as negatives, or black would hide the colours

Picture = Float[Tensor, "height width rgb"]  # from 0 to 1
Tile = Float[np.ndarray, "height width rgb"]


class Row(NamedTuple):
    """An image and the maps over it.

    Attributes:
        name: what stands before the row.
        image: what is looked at.
        maps: one value a patch, where 1 is neutral.
        numbers: what stands below each map; None for nothing.
    """

    name: str
    image: Picture
    maps: Float[Tensor, "H y x"]
    numbers: Float[Tensor, " H"] | None


def tiles(
    rows: list[Row], *, columns: list[str], unit: str, alt: str, with_images: bool = True
) -> str:
    """Draw rows of tiles as an image in the page: each image, and then its maps.

    Args:
        rows: all with images of one size and equally many maps.
        columns: what stands above each map.
        unit: what 1 is on the colour scale.
        alt: what is seen.
        with_images: whether the images themselves are shown; white ones leave the maps alone.
    """
    height, width, _ = rows[0].image.shape
    step = height / width + (GAP if rows[0].numbers is None else BELOW)
    names = dict(enumerate(["image", *columns]))
    if not with_images:
        del names[0]
    on_black = bool(torch.stack([row.image for row in rows]).median() < ON_BLACK)

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlim=(min(names), 1 + len(columns)), ylim=(len(rows) * step, 0))
        for i, row in enumerate(rows):
            _draw_row(axes, row, i * step, on_black=on_black)
        middle = (1 - GAP) / 2
        axes.set_xticks([x + middle for x in names], names.values())
        places = step * np.arange(len(rows)) + middle * height / width
        axes.set_yticks(places, [label(row.name) for row in rows])
        axes.xaxis.tick_top()
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        _scale_bar(figure, axes, unit)

    height_shown = len(rows) * step * TILE + 2 * AROUND
    return chart(draw, alt=alt, width=tiles_width(rows), height=height_shown)


def tiles_width(rows: list[Row]) -> float:
    """Tell how wide the rows are drawn, in CSS pixels."""
    longest = max(len(label(row.name)) for row in rows)
    return (len(rows[0].maps) + 1) * TILE + longest * LETTER + AROUND


def _draw_row(axes: Axes, row: Row, top: float, *, on_black: bool) -> None:
    image = _fitted(row.image, row.maps.shape[1:])
    bottom = top + (1 - GAP) * row.image.shape[0] / row.image.shape[1]
    light = image.mean(dim=-1).numpy()
    shade = 1 - SHADE * (light if on_black else 1 - light)
    for x, tile in enumerate([image.numpy(), *(_overlaid(values, shade) for values in row.maps)]):
        axes.imshow(tile, extent=(x, x + 1 - GAP, bottom, top))
    for x, number in enumerate([] if row.numbers is None else row.numbers.tolist(), start=1):
        place = x + (1 - GAP) / 2, bottom + BELOW / 2
        axes.text(*place, f"{number:.1f}", ha="center", va="center", fontsize=7)


def _fitted(image: Picture, grid: tuple[int, ...]) -> Picture:
    """The image with a whole number of pixels to a patch, no more than a tile can show."""
    longest = max(grid)
    per_patch = max(1, min(max(image.shape[:2]) // longest, TILE // longest))
    size = [per_patch * n for n in grid]
    fitted = F.interpolate(rearrange(image, "y x rgb -> 1 rgb y x"), size, mode="area")
    return rearrange(fitted, "1 rgb y x -> y x rgb")


def _overlaid(values: Float[Tensor, "y x"], shade: Float[np.ndarray, "height width"]) -> Tile:
    per_patch = shade.shape[0] // values.shape[0]
    colors = DIVERGING(_scale()(values.numpy()))[..., :3]
    colors = repeat(colors, "y x rgb -> (y fy) (x fx) rgb", fy=per_patch, fx=per_patch)
    return colors * shade[..., None]


def _scale() -> LogNorm:
    return LogNorm(1 / FURTHEST, FURTHEST, clip=True)


def _scale_bar(figure: Drawing, axes: Axes, unit: str) -> None:
    colors = ScalarMappable(_scale(), DIVERGING)
    aspect = BAR * axes.get_xlim()[1]
    bar = figure.colorbar(colors, ax=axes, location="bottom", aspect=aspect, shrink=0.8, pad=0.01)
    bar.minorticks_off()
    bar.set_ticks([1 / 4, 1 / 2, 1, 2, 4], labels=["1/4", "1/2", "1", "2", "4"])
    bar.set_label(f"times {unit}")
    bar.outline.set_visible(False)
