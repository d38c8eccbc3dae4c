"""The kernels themselves: what a token takes in, block by block."""

import math

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from onescan.layers.mixers.linear_diffusion import Diffusion
from onescan.report.chart import chart
from onescan.report.diffusion.curves import colors, curves
from onescan.report.diffusion.lines import Lags, Line
from onescan.report.diffusion.panels import WIDE, panels, spell_shares
from onescan.report.palette import MUTED
from onescan.report.section import Figure
from onescan.report.words import percent, plural

FAINT = 0.01  # of a panel's height: further out lies nothing to see
MOST_PANELS = 8  # side by side
PANEL, AROUND = 132, 62  # CSS pixels: height of a block's panel; what surrounds the panels

Taken = Float[np.ndarray, "blocks H places"]  # 2R+1 of them, the token itself in the middle


def kernel_figure(lines: list[Line]) -> Figure:
    """Each block's kernels, and what they were before training."""
    taken = [(_taken(line.learnt), _taken(line.initial)) for line in lines]
    top = 1.08 * max(float(np.nanmax(each)) for each in taken)
    pictures = [_picture(line, *each, top) for line, each in zip(lines, taken, strict=True)]
    implicit = " A step is implicit: it hears by way of others, too."
    return Figure(
        "What a token takes in, block by block",
        panels(lines, pictures, width=WIDE),
        "How much of each place a token takes in at a step, dt K, against the distance t - s: "
        f"numbers above 0 are {' or '.join(line.back for line in lines)}. The gap is the token "
        f"itself, which keeps the rest. Dashed: before training.{colors(lines[0].kernels)} All "
        "panels have one scale, and end where there is nothing to see."
        f"{implicit * lines[0].implicit}",
        columns=3,
    )


def _taken(diffusions: list[Diffusion]) -> Taken:
    """What a token takes in per step, dt K, with a gap where it is itself."""
    taken = []
    for diffusion in diffusions:
        weights = diffusion.weights()
        each = weights * diffusion.dt(weights).unsqueeze(1)
        each[:, diffusion.radius] = math.nan
        taken.append(each.double())
    stacked: Taken = torch.stack(taken).numpy()
    return stacked


def _picture(line: Line, learnt: Taken, initial: Taken, top: float) -> str:
    """A panel for each block, up to where there is something to see."""
    blocks = len(learnt)
    lags = _drawn_lags(line, FAINT * top, learnt, initial)
    places = learnt.shape[-1] // 2 + lags
    rows = math.ceil(blocks / MOST_PANELS)
    columns = math.ceil(blocks / rows)

    def draw(figure: Drawing) -> None:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[blocks:]:
            axes.set_visible(False)
        for i, axes in enumerate(grid.flat[:blocks]):
            axes.set_title(f"block {i + 1}", fontsize=8.5, color=MUTED)
            curves(axes, lags, learnt[i][:, places], initial[i][:, places])
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        grid[0, 0].set_ylim(0, top)
        spell_shares(grid[0, 0].yaxis)
        figure.supxlabel(line.back, fontsize=8.5, color=MUTED)
        figure.supylabel("share taken in", fontsize=8.5, color=MUTED)

    most = percent(float(np.nanmax(learnt)))
    alt = (
        f"Line charts of what a token takes in by distance in each of {plural(blocks, 'block')}; "
        f"at most {most} of one other"
    )
    return chart(draw, alt=alt, width=WIDE, height=rows * PANEL + AROUND)


def _drawn_lags(line: Line, least: float, learnt: Taken, initial: Taken) -> Lags:
    """As far out as any of the kernels takes in more than the least, and to where the line ends."""
    *_, places = np.nonzero(np.concatenate([learnt, initial]) > least)
    furthest = int(np.abs(places - learnt.shape[-1] // 2).max(initial=1))
    shown = min(furthest, max(line.tokens - 1, 1))
    return np.arange(-shown, shown + 1)
