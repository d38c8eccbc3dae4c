"""A dot for each kernel of each block: how wide it is, and how long its step."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from onescan.layers.mixers.linear_diffusion import Diffusion
from onescan.ops.linear_diffusion import stable_step
from onescan.report.chart import chart
from onescan.report.diffusion.lines import Line, PerBlock
from onescan.report.diffusion.panels import count_blocks, panels, spell_shares
from onescan.report.palette import BLUE, SERIES, series
from onescan.report.scales import log_scale
from onescan.report.section import Figure
from onescan.report.words import plural

SPREAD = 0.5  # of a block's place, for its kernels
MARGIN = 1.3  # by which factor the axis of widths goes on below and above

Both = Float[np.ndarray, "2 blocks H"]  # learnt, initial


def width_figure(lines: list[Line]) -> Figure:
    """The standard deviation of each kernel's Gaussian."""
    widths = [_both(line, _widths) for line in lines]
    limits = float(np.min(widths)) / MARGIN, float(np.max(widths)) * MARGIN

    def finish(axes: Axes) -> None:
        axes.set_ylim(limits)
        log_scale(axes)

    pictures = [
        _dots(each, what="kernel widths", y=f"sigma, {line.nouns}", finish=finish)
        for line, each in zip(lines, widths, strict=True)
    ]
    return Figure(
        "Width of the kernels",
        panels(lines, pictures),
        "The standard deviation of each block's Gaussian: so far away a place weighs 61% of what "
        f"it would close by.{_meaning(lines[0].kernels)}",
    )


def step_figure(lines: list[Line]) -> Figure:
    """Each kernel's step in time, compared with the longest stable one."""
    steps = [_both(line, _steps) for line in lines]
    top = max(1.0, 1.05 * float(np.max(steps)))

    def finish(axes: Axes) -> None:
        axes.set_ylim(0, top)
        spell_shares(axes.yaxis)

    pictures = [
        _dots(each, what="steps", y="step / longest stable step", finish=finish) for each in steps
    ]
    meaning = (
        "an implicit one may be longer"
        if lines[0].implicit
        else "the part of itself that a token far from both ends gives up for others"
    )
    return Figure(
        "Step in time",
        panels(lines, pictures),
        f"dt as a share of the longest stable explicit step: {meaning}."
        f"{_meaning(lines[0].kernels)}",
    )


def _both(line: Line, of: Callable[[list[Diffusion]], PerBlock]) -> Both:
    return np.stack([of(line.learnt), of(line.initial)])


def _widths(diffusions: list[Diffusion]) -> PerBlock:
    sigmas: PerBlock = torch.stack([each.sigma() for each in diffusions]).double().numpy()
    return sigmas


def _steps(diffusions: list[Diffusion]) -> PerBlock:
    shares = []
    for diffusion in diffusions:
        weights = diffusion.weights()
        shares.append(diffusion.dt(weights) / stable_step(weights))
    stacked: PerBlock = torch.stack(shares).double().numpy()
    return stacked


def _meaning(kernels: int) -> str:
    """Sentences on what a dot is, and its colour."""
    if kernels > len(SERIES):
        return f" A dot is one of {kernels} kernels."
    return " A colour is a kernel." * (kernels > 1) + " Ring: before training."


def _dots(both: Both, *, what: str, y: str, finish: Callable[[Axes], object]) -> str:
    (now, before), (_, blocks, kernels) = both, both.shape
    within = SPREAD * ((np.arange(kernels) + 0.5) / kernels - 0.5)
    places = np.arange(1, blocks + 1)[:, None] + within

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="block", ylabel=y, xlim=(0.5, blocks + 0.5))
        if kernels > len(SERIES):
            axes.plot(places, now, "o", color=BLUE, markersize=2, alpha=0.6)
        else:
            _from_rings(axes, places, now, before)
        count_blocks(axes.xaxis)
        axes.grid(visible=False, axis="x")
        finish(axes)

    alt = (
        f"Dot chart of the {what} of {plural(blocks, 'block')}: learnt from {now.min():.3g} to "
        f"{now.max():.3g}, before training from {before.min():.3g} to {before.max():.3g}"
    )
    return chart(draw, alt=alt)


def _from_rings(axes: Axes, places: PerBlock, now: PerBlock, before: PerBlock) -> None:
    """A dot for what is now, on a line from a ring for what was before."""
    for i, (x, y, start) in enumerate(zip(places.T, now.T, before.T, strict=True)):
        axes.vlines(x, start, y, color=series(i), alpha=0.35, linewidth=1)
        ring, *_ = axes.plot(x, start, "o", color=series(i), markersize=3.5)
        ring.set(markerfacecolor="white", markeredgewidth=0.8, alpha=0.6)
        axes.plot(x, y, "o", color=series(i), markersize=3.5)
