"""What MD-TPE learnt: how much of what lies n patches away along an axis each channel takes in."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from onescan.layers.position import ToeplitzPosition
from onescan.models.denoiser import Denoiser
from onescan.models.image_classifier import ImageClassifier
from onescan.report.chart import chart, label_ends
from onescan.report.palette import BLUE, DIVERGING, INK, MUTED
from onescan.report.runs import RunGroup
from onescan.report.section import Figure, Section
from onescan.shapes import Grid

TITLE = "What the position kernels learnt"
SINGLES = 6  # channels drawn one by one
MARGIN = 0.05  # above and below
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Direction(NamedTuple):
    """An axis of an image, and where lags above 0 lie."""

    axis: str
    back: str


DIRECTIONS = (
    Direction("Along columns", "patches above"),
    Direction("Along rows", "patches to the left"),
)

Kernels = Float[np.ndarray, "channels _"]  # each axis has its own number of lags
Lags = Int[np.ndarray, " _"]  # patches back; negative ones lie ahead


def section(study: RunGroup) -> Section:
    """Kernel against lag for each axis, and all channels at a glance."""
    model = study.model
    if not isinstance(model, ImageClassifier | Denoiser) or not isinstance(
        model.position, ToeplitzPosition
    ):
        return Section(TITLE, lead="Not shown: this model has no Toeplitz positions (MD-TPE).")
    config = model.config
    shape = model.patchify.grid_shape((config.channels, *config.image_size))
    learnt = axis_kernels(model.position, shape)
    initial = axis_kernels(_initial(model, shape), shape)
    lags = [np.arange(n - kernels.shape[1], n) for n, kernels in zip(shape, learnt, strict=True)]
    limits = _limits(learnt)
    axes = zip(lags, learnt, initial, DIRECTIONS, strict=True)
    panels = "".join(
        f"<div><h4>{direction.axis}</h4>{_bands(distances, now, before, direction, limits)}</div>"
        for distances, now, before, direction in axes
    )
    bands = Figure(
        "Weight against distance",
        f'<div class="panels">{panels}</div>',
        "How much a patch takes in of another that lies so many patches away. Blue line: median "
        "over channels; bands: the middle half and the middle 90%; grey: single channels; dashed: "
        "the median before training.",
        columns=2,
    )
    overview = Figure(
        "All channels",
        _overview(lags, learnt),
        "A row is a channel's kernel, divided by its largest weight: orange adds, blue "
        "subtracts. Rows are sorted by reach, from channels that keep to the patch itself (top) "
        "to those that gather the whole axis (bottom).",
    )
    sides = "on both sides of it" if model.position.bidirectional else "before it"
    lead = (
        "Before the first block, MD-TPE replaces each patch by a weighted sum of itself and of the "
        f"patches {sides} in its column and in its row, channel by channel. "
        f"Seed {study.runs[0].seed}'s model."
    )
    return Section(TITLE, (bands, overview), lead)


def axis_kernels(position: ToeplitzPosition, shape: tuple[int, ...]) -> list[Kernels]:
    """Each axis' kernels, from the furthest patch ahead (if any is seen) to the furthest behind."""
    with torch.no_grad():
        kernels = position.kernels(max(shape))  # axes (2) D lags
    one_sided = (axis[..., :n] for axis, n in zip(kernels, shape, strict=True))
    if not position.bidirectional:
        return [axis.numpy() for axis in one_sided]
    return [_two_sided(*axis).numpy() for axis in one_sided]


def _two_sided(
    back: Float[Tensor, "channels n"], ahead: Float[Tensor, "channels n"]
) -> Float[Tensor, "channels lags"]:
    """Lag 0 is counted once, in the direction that looks back."""
    return torch.cat([ahead[:, 1:].flip(1), back], dim=1)


def _initial(model: ImageClassifier | Denoiser, shape: tuple[int, ...]) -> ToeplitzPosition:
    """Positions as before training; chance has so little part in them that any seed will do."""
    config = model.config
    assert config.position is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        position = config.position.build(width=config.width, grid=Grid(shape, model.prefix))
    assert isinstance(position, ToeplitzPosition)
    return position


def _limits(learnt: list[Kernels]) -> tuple[float, float]:
    """One scale for all axes, so that they compare."""
    low = min(np.quantile(axis, QUANTILES[0], axis=0).min() for axis in learnt)
    high = max(np.quantile(axis, QUANTILES[-1], axis=0).max() for axis in learnt)
    return float(low - MARGIN * (high - low)), float(high + MARGIN * (high - low))


def _bands(
    lags: Lags,
    learnt: Kernels,
    initial: Kernels,
    direction: Direction,
    limits: tuple[float, float],
) -> str:
    low, lower, median, upper, high = np.quantile(learnt, QUANTILES, axis=0)
    before = np.median(initial, axis=0)
    singles = learnt[_by_reach(lags, learnt)][:: -(-len(learnt) // SINGLES)]

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel=direction.back, ylabel="weight", ylim=limits)
        axes.plot(lags, singles.T, color=MUTED, alpha=0.5, linewidth=0.6)
        axes.fill_between(lags, low, high, color=BLUE, alpha=0.15, linewidth=0)
        axes.fill_between(lags, lower, upper, color=BLUE, alpha=0.25, linewidth=0)
        axes.plot(lags, before, color=INK, linestyle=(0, (3, 2)), linewidth=1.2)
        axes.plot(lags, median, color=BLUE, marker="o", markersize=3.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        end = float(lags[-1])
        learnt_end, initial_end = float(median[-1]), float(before[-1])
        label_ends(axes, [(end, learnt_end, "learnt", BLUE), (end, initial_end, "initial", INK)])

    alt = (
        f"Line chart of the kernels {direction.axis.lower()}: at distance 0 the median weight is "
        f"{median[lags == 0].item():.3g}, at distance {lags[-1]} it is {median[-1]:.3g}"
    )
    return chart(draw, alt=alt)


def _overview(lags: list[Lags], learnt: list[Kernels]) -> str:
    def draw(figure: Drawing) -> None:
        for i, (distances, kernels) in enumerate(zip(lags, learnt, strict=True)):
            axes = figure.add_subplot(1, len(learnt), i + 1, title=DIRECTIONS[i].axis)
            rows = kernels[_by_reach(distances, kernels)]
            rows = rows / np.abs(rows).max(axis=1, keepdims=True)
            edges = distances[0] - 0.5, distances[-1] + 0.5, len(rows), 0
            axes.imshow(rows, cmap=DIVERGING, vmin=-1, vmax=1, extent=edges, aspect="auto")
            axes.set(xlabel=DIRECTIONS[i].back, yticks=[])
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(visible=False)
            axes.spines[:].set_visible(False)

    return chart(draw, alt="Heat maps of the kernels of all channels, sorted by reach")


def _by_reach(lags: Lags, kernels: Kernels) -> Int[np.ndarray, " channels"]:
    """Channels in the order of the mean distance that their weight lies at."""
    weight = np.abs(kernels)
    return np.argsort((weight * np.abs(lags)).sum(axis=1) / weight.sum(axis=1), kind="stable")
