"""Sections about what the layers of LightNet learned."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float, Int
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from onescan.experiments.report.format import TIMES, label, percent
from onescan.experiments.report.images import (
    held_out_labels,
    held_out_pixels,
    patch_grid,
    to_bytes,
    unknown_rows,
)
from onescan.experiments.report.page import Figure, Section, fragment
from onescan.experiments.report.plots import (
    BLUE,
    DASHED,
    GRID,
    INK,
    MUTED,
    VERMILION,
    WIDTH,
    Line,
    diverging,
    line_chart,
    matrix,
    to_svg,
)
from onescan.experiments.report.runs import RunGroup
from onescan.experiments.tasks import ImageClassification
from onescan.layers.block import Block
from onescan.layers.mixers import LightNetMixer
from onescan.layers.position import ToeplitzPosition
from onescan.messages import plural
from onescan.models.denoiser import Denoiser
from onescan.models.image_classifier import ImageClassifier
from onescan.ops.lrpe import lrpe_frequencies
from onescan.shapes import Grid, Images

KEYS = "Key importance"
MAX_EXAMPLES, MAX_TILES = 10, 80  # rows of images, and tiles in a block
MAX_BLOCKS, MAX_HEADS = 24, 16
MAX_AVERAGED, BATCH_SIZE = 100, 20  # images
TILE = 46  # CSS pixels
GAP, NUMBER = 0.08, 0.3  # between tiles, and for a number below them; relative to a tile
LETTER, MARGIN = 6.5, 40  # CSS pixels: of a row's name, and around the tiles
FURTHEST = 4  # times the uniform share, or a fraction of it, with the full color
SHADE = 0.35  # how much an image may darken a color
DARK = 0.25  # images with a lower median are shown as negatives below the colors

TOEPLITZ = "Position kernels"
IMAGE_DIRECTIONS = (("Along columns", "patches above"), ("Along rows", "patches to the left"))
SINGLE_CHANNELS = 6
BANDS = (0.05, 0.25, 0.5, 0.75, 0.95)  # quantiles

LRPE = "Rotation frequencies"

Module = TypeVar("Module", bound=nn.Module)
Shares = Float[Tensor, "B H T"]
Kernels = Float[np.ndarray, "channels _"]  # each axis has its own number of lags
Lags = Int[np.ndarray, " _"]  # patches behind; negative ones lie ahead


def directions(axes: int) -> tuple[tuple[str, str], ...]:
    """Return a heading for each axis of a grid, and where positive lags lie."""
    if axes == len(IMAGE_DIRECTIONS):
        return IMAGE_DIRECTIONS
    return tuple((f"Along axis {axis}", "patches before") for axis in range(axes))


def find(model: nn.Module, kind: type[Module]) -> list[Module]:
    """Return the model's modules of one class, from the first block to the last."""
    return [module for module in model.modules() if isinstance(module, kind)]


def run_hooked(
    model: nn.Module,
    kind: type[nn.Module],
    hook: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    run: Callable[[], object],
) -> None:
    """Call `run` with a hook before each module of one class, and remove the hooks."""
    hooks = [
        module.register_forward_pre_hook(hook, with_kwargs=True) for module in find(model, kind)
    ]
    try:
        with torch.no_grad():
            run()
    finally:
        for each in hooks:
            each.remove()


def other_mixers(model: nn.Module, mixers: Sequence[nn.Module]) -> str:
    """Return a note if a model, such as a hybrid, has other mixers than those of a figure."""
    return " Blocks with other mixers are not counted." * (len(mixers) < len(find(model, Block)))


# Key importance


def key_shares(model: nn.Module, images: Images) -> list[Shares]:
    """Return each token's share of each head's context, one tensor per LightNet mixer.

    A head's context is a weighted sum of values; a token's share is its weight, the softmax of
    its key over all tokens, averaged over the key's channels. The shares sum to 1.
    """
    shares: list[Shares] = []

    def record(mixer: nn.Module, arguments: tuple[Any, ...], _: dict[str, Any]) -> None:
        assert isinstance(mixer, LightNetMixer)
        shares.append(mixer.key_importance(arguments[0]))

    run_hooked(model, LightNetMixer, record, partial(model, images))
    return shares


def key_importance(group: RunGroup) -> Section:
    """Key importance for one image of each class in three blocks, and its mean in every block."""
    model, mixers = group.model, find(group.model, LightNetMixer)
    if not mixers or not isinstance(model, ImageClassifier):
        return Section(
            KEYS, lead="Not shown: this is not an image classifier with LightNet mixers."
        )
    if len(patch_grid(model)) != len(IMAGE_DIRECTIONS):
        return Section(KEYS, lead="Not shown: the figures need images with two axes.")
    if reason := unknown_rows(group):
        return Section(KEYS, lead=reason)
    if not mixers[0].config.decay:
        return Section(KEYS, lead="Not shown: without decay, keys are not normalized over tokens.")
    lead = (
        "Each LightNet head reads one weighted sum over all tokens; a token's weight comes from "
        f"its key. Model of seed {group.runs[0].seed}.{other_mixers(model, mixers)}"
    )
    return Section(
        KEYS, [_examples_figure(group, model), _mean_figure(group, model)], lead, folded=True
    )


class Example(NamedTuple):
    """An image, its class name, and each layer's shares of its tokens."""

    name: str
    image: Float[Tensor, "height width rgb"]
    shares: list[Float[Tensor, "H T"]]


def examples(group: RunGroup, model: ImageClassifier) -> list[Example]:
    """Return an image of each class, or of some: the first that the model classifies correctly."""
    labels, predictions = held_out_labels(group), group.array("predictions")[0]
    correct = (labels == predictions).int()
    present, heads = labels.unique(), len(_heads(model))
    present = present[evenly_spaced(len(present), min(MAX_EXAMPLES, max(MAX_TILES // heads, 3)))]
    chosen = torch.stack([((labels == i) * (1 + correct)).argmax() for i in present])
    pixels = held_out_pixels(group, chosen)
    shares = key_shares(model, _model_input(group, pixels))
    return [
        Example(group.class_names[int(name)], image, [layer[i] for layer in shares])
        for i, (name, image) in enumerate(zip(present, _rgb(pixels), strict=True))
    ]


def _examples_figure(group: RunGroup, model: ImageClassifier) -> Figure:
    shown, depth = examples(group, model), len(find(model, LightNetMixer))
    blocks = sorted({0, depth // 2, depth - 1})
    panels = []
    for block in blocks:
        description = f"Heat maps of the key importance of each head of block {block + 1}"
        rows = [_row(model, each, each.name, block) for each in shown]
        panels.append(
            (f"Block {block + 1} of {depth}", tiles(rows, _head_names(model), description))
        )
    tokens = shown[0].shares[0].shape[1]
    number = " The number below is the share of the class token." * model.prefix
    return Figure(
        "Key importance, relative to a uniform share",
        fragment("panels", panels, panel=0.8 * tiles_width(rows)) + _tiles_legend(),
        f"Rows are images, columns are heads. Orange patches contribute more than 1/{tokens} "
        f"({percent(1 / tokens, 2)}) of the head's context, blue ones less.{number}"
        f"{_omitted(len(blocks), depth, 'block')}{_heads_omitted(model)}",
        columns=3,
    )


def _mean_figure(group: RunGroup, model: ImageClassifier) -> Figure:
    """Average over evenly spaced images, because a data set may be sorted by class."""
    indices = evenly_spaced(len(held_out_labels(group)), MAX_AVERAGED)
    pixels = held_out_pixels(group, torch.tensor(indices))
    batches = [key_shares(model, _model_input(group, batch)) for batch in pixels.split(BATCH_SIZE)]
    means = [torch.cat(layer).mean(dim=0) for layer in zip(*batches, strict=True)]
    mean, depth = Example("mean", _rgb(pixels[:1])[0], means), len(means)
    blocks = evenly_spaced(depth, MAX_BLOCKS)
    rows = [_row(model, mean, f"block {block + 1}", block) for block in blocks]
    description = "Heat maps of the mean key importance of each head"
    drawn = tiles(rows, _head_names(model), description, with_images=False)
    return Figure(
        "Every block, averaged over images",
        fragment("panels", [("", drawn)], panel=0.8 * tiles_width(rows)) + _tiles_legend(),
        "Rows are blocks, columns are heads, in the same colors: the mean over "
        f"{plural(len(indices), 'test image')} shows preferences for locations that do not depend "
        f"on the image.{_omitted(len(blocks), depth, 'block')}{_heads_omitted(model)}",
        columns=1 if tiles_width(rows) < 1.1 * WIDTH else 2,
    )


def evenly_spaced(count: int, limit: int) -> list[int]:
    """Return at most `limit` of 0 to count - 1, evenly spaced, both ends included.

    >>> evenly_spaced(3, 5), evenly_spaced(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    return torch.linspace(0, count - 1, min(count, limit)).round().int().tolist()


def _model_input(group: RunGroup, pixels: Images) -> Images:
    assert isinstance(group.task, ImageClassification)
    return group.task.format.model_input(pixels)


def _rgb(pixels: Images) -> Float[Tensor, "B height width rgb"]:
    return torch.from_numpy(to_bytes(pixels)).float() / 255


def _heads(model: ImageClassifier) -> list[int]:
    return evenly_spaced(find(model, LightNetMixer)[0].config.num_heads, MAX_HEADS)


def _head_names(model: ImageClassifier) -> list[str]:
    return [f"{'head ' * (i == 0)}{head + 1}" for i, head in enumerate(_heads(model))]


def _heads_omitted(model: ImageClassifier) -> str:
    heads = find(model, LightNetMixer)[0].config.num_heads
    return _omitted(len(_heads(model)), heads, "head")


def _omitted(shown: int, count: int, noun: str) -> str:
    return f" {shown} of {count} {noun}s are shown." * (shown < count)


class TileRow(NamedTuple):
    """An image and the maps over its patches.

    Attributes:
        name: Written before the row.
        image: The image.
        maps: One value per patch, where 1 is neutral.
        numbers: Written below the maps, or None.
    """

    name: str
    image: Float[Tensor, "height width rgb"]
    maps: Float[Tensor, "H y x"]
    numbers: Float[Tensor, " H"] | None


def _row(model: ImageClassifier, example: Example, name: str, block: int) -> TileRow:
    shares = example.shares[block][_heads(model)]
    relative = shares * shares.shape[1]  # H T, to the uniform share
    grid = model.patchify.grid_shape((model.config.channels, *example.image.shape[:2]))
    maps = rearrange(relative[:, model.prefix :], "h (y x) -> h y x", x=grid[1])
    numbers = relative[:, : model.prefix].sum(dim=1) if model.prefix else None
    return TileRow(name, example.image, maps, numbers)


def tiles(
    rows: Sequence[TileRow], names: Sequence[str], description: str, *, with_images: bool = True
) -> Markup:
    """Draw rows of tiles: each image followed by its maps, or the maps alone.

    Args:
        rows: Rows with images of one size and equally many maps.
        names: Names of the maps.
        description: What the chart shows.
        with_images: Whether images are shown and visible below their maps.
    """
    dark = float(torch.stack([row.image for row in rows]).median()) < DARK
    columns = [*["image"] * with_images, *names]
    drawn = [_tile_images(row, with_images=with_images, negative=dark) for row in rows]
    height, width, _ = drawn[0][0].shape
    gap = GAP if rows[0].numbers is None else NUMBER
    step = height / width + gap  # from row to row, where a tile and its gap are 1 + GAP wide

    def draw(axes: Axes) -> None:
        for i, (row, images) in enumerate(zip(rows, drawn, strict=True)):
            bottom = i * step + height / width
            for x, image in enumerate(images):
                left = x * (1 + GAP)
                axes.imshow(image, extent=(left, left + 1, bottom, i * step))
                corner, size = (left, i * step), (1, height / width)
                axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=GRID, linewidth=0.6))
            for x, number in enumerate([] if row.numbers is None else row.numbers.tolist()):
                center = (x + with_images) * (1 + GAP) + 0.5
                axes.text(
                    center, bottom + gap / 2, f"{number:.1f}", ha="center", va="center", fontsize=7
                )
        axes.set_xlim(0, len(columns) * (1 + GAP))
        axes.set_ylim(len(rows) * step, 0)
        axes.set_xticks(np.arange(len(columns)) * (1 + GAP) + 0.5, columns)
        axes.set_yticks(
            np.arange(len(rows)) * step + height / width / 2, [label(row.name) for row in rows]
        )
        axes.xaxis.tick_top()
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)

    size = len(rows) * step * TILE + MARGIN
    return to_svg(draw, description=description, width=tiles_width(rows), height=size)


def tiles_width(rows: Sequence[TileRow]) -> float:
    """Return the width of a chart of tiles, in CSS pixels."""
    longest = max(len(label(row.name)) for row in rows)
    return (len(rows[0].maps) + 1) * (1 + GAP) * TILE + longest * LETTER + MARGIN


def _tile_images(
    row: TileRow, *, with_images: bool, negative: bool
) -> list[Float[np.ndarray, "height width rgba"]]:
    strengths = np.log2(row.maps.numpy().clip(1e-9)) / math.log2(FURTHEST)
    colors = diverging(strengths)  # H y x rgba
    if not with_images:
        return list(colors)
    image = _fitted(row.image, row.maps.shape[1:])
    light = image.mean(dim=-1).numpy()
    shade = 1 - SHADE * (light if negative else 1 - light)
    size = [n // m for n, m in zip(shade.shape, row.maps.shape[1:], strict=True)]
    colors = repeat(colors, "h y x rgba -> h (y fy) (x fx) rgba", fy=size[0], fx=size[1])
    opacity = colors[..., 3:]
    tinted = (colors[..., :3] * opacity + 1 - opacity) * shade[..., None]  # on white
    return [image.numpy(), *tinted]


def _fitted(
    image: Float[Tensor, "height width rgb"], grid: tuple[int, ...]
) -> Float[Tensor, "y x rgb"]:
    """Resize an image to a whole number of pixels per patch, as small as a tile."""
    longest = max(grid)
    per_patch = max(1, min(max(image.shape[:2]) // longest, TILE // longest))
    size = [per_patch * n for n in grid]
    resized = F.interpolate(rearrange(image, "y x rgb -> 1 rgb y x"), size, mode="area")
    return rearrange(resized, "1 rgb y x -> y x rgb")


def _tiles_legend() -> Markup:
    ends = f"1/{FURTHEST} of the uniform share", f"{FURTHEST} {TIMES}"
    return fragment("legend", ends[0], ends[1], "var(--blue), transparent, var(--vermilion)")


# Toeplitz positions


def position_kernels(group: RunGroup) -> Section:
    """MD-TPE's weights by distance along each axis, and the kernels of all channels."""
    model = group.model
    if not isinstance(model, ImageClassifier | Denoiser) or not isinstance(
        model.position, ToeplitzPosition
    ):
        return Section(TOEPLITZ, lead="Not shown: this model has no Toeplitz positions (MD-TPE).")
    shape = patch_grid(model)
    learned = axis_kernels(model.position, shape)
    initial = axis_kernels(_initial_position(model, shape), shape)
    lags = [np.arange(n - kernels.shape[1], n) for n, kernels in zip(shape, learned, strict=True)]
    low = min(np.quantile(axis, BANDS[0], axis=0).min() for axis in learned)
    high = max(np.quantile(axis, BANDS[-1], axis=0).max() for axis in learned)
    margin = 0.05 * (high - low)
    limits = float(low - margin), float(high + margin)  # equal for all axes
    panels = [
        (name, _bands(lags[axis], learned[axis], initial[axis], (name, behind), limits))
        for axis, (name, behind) in enumerate(directions(len(shape)))
    ]
    by_distance = Figure(
        "Weight by distance",
        fragment("panels", panels),
        "Weight of a patch by its distance. Blue line: median over channels; bands: the middle "
        "50% and 90%; gray: single channels; dashed: the median before training.",
        columns=2,
    )
    overview = Figure(
        "All channels",
        _all_channels(lags, learned),
        "Each row is the kernel of a channel, divided by its largest weight; orange is positive, "
        "blue negative. Rows are sorted by the mean distance of the weights, from local kernels "
        "(top) to those that span the whole axis (bottom).",
    )
    neighbors = "on both sides" if model.position.bidirectional else "before it"
    where = "along all axes; shown are those " if model.position.joint else ""
    lines = "in its column and row" if len(shape) == len(IMAGE_DIRECTIONS) else "along each axis"
    lead = (
        "Before the first block, MD-TPE replaces each patch by a weighted sum of itself and the "
        f"patches {neighbors} {where}{lines}, channel by channel. "
        f"Model of seed {group.runs[0].seed}."
    )
    return Section(TOEPLITZ, [by_distance, overview], lead, folded=True)


def axis_kernels(position: ToeplitzPosition, shape: tuple[int, ...]) -> list[Kernels]:
    """Return the kernels of each axis, from the furthest patch ahead to the furthest behind."""
    with torch.no_grad():
        kernels = position.kernels(max(shape))  # axes (2) D lags
    axes = [axis[..., :n] for axis, n in zip(kernels, shape, strict=True)]
    if position.bidirectional:  # lag 0 counts once, in the direction that looks back
        axes = [torch.cat([ahead[:, 1:].flip(1), back], dim=1) for back, ahead in axes]
    return [axis.numpy() for axis in axes]


def _initial_position(
    model: ImageClassifier | Denoiser, shape: tuple[int, ...]
) -> ToeplitzPosition:
    """Positions before training; they hardly depend on the seed."""
    config = model.config
    assert config.position is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        position = config.position.build(width=config.width, grid=Grid(shape, model.prefix))
    assert isinstance(position, ToeplitzPosition)
    return position


def _bands(
    lags: Lags,
    learned: Kernels,
    initial: Kernels,
    direction: tuple[str, str],
    limits: tuple[float, float],
) -> Markup:
    name, behind = direction
    low, lower, median, upper, high = np.quantile(learned, BANDS, axis=0)
    before = np.median(initial, axis=0)
    singles = learned[_by_distance(lags, learned)][:: -(-len(learned) // SINGLE_CHANNELS)]
    lines = [
        *(Line("", MUTED, lags, single, width=0.6, alpha=0.5) for single in singles),
        Line("", BLUE, lags, median, band=(low, high)),
        Line("initial", INK, lags, before, style=DASHED, width=1.2),
        Line("learned", BLUE, lags, median, band=(lower, upper), dots=True),
    ]
    description = (
        f"Line chart of the kernels {name.lower()}: the median weight is "
        f"{median[lags == 0].item():.3g} at distance 0 and {median[-1]:.3g} at distance {lags[-1]}"
    )
    return line_chart(lines, x=behind, y="weight", limits=limits, description=description)


def _all_channels(lags: Sequence[Lags], learned: Sequence[Kernels]) -> Markup:
    panels, width = [], WIDTH / len(lags)
    for distances, kernels, (name, behind) in zip(
        lags, learned, directions(len(lags)), strict=True
    ):
        rows = kernels[_by_distance(distances, kernels)]
        colors = diverging(rows / np.abs(rows).max(axis=1, keepdims=True))
        description = f"Heat map of the kernels {name.lower()}, sorted by mean distance"
        ends = float(distances[0]), float(distances[-1])
        panels.append((name, matrix(colors, ends, x=behind, description=description, width=width)))
    return fragment("panels", panels, panel=0.8 * width)


def _by_distance(lags: Lags, kernels: Kernels) -> Int[np.ndarray, " channels"]:
    """Sort channels by the mean distance of their weights."""
    weight = np.abs(kernels)
    return np.argsort((weight * np.abs(lags)).sum(axis=1) / weight.sum(axis=1), kind="stable")


# Rotations


def frequencies(group: RunGroup) -> Section:
    """Learned and initial frequencies of MD-LRPE along each axis."""
    mixers = [mixer for mixer in find(group.model, LightNetMixer) if mixer.config.lrpe]
    if not mixers or not isinstance(group.model, ImageClassifier | Denoiser):
        return Section(LRPE, lead="Not shown: this model has no learned rotations (MD-LRPE).")
    theta = torch.stack([mixer.theta.detach() for mixer in mixers])  # blocks H K
    width = theta.shape[-1]
    along = directions(len(patch_grid(group.model)))
    initial = lrpe_frequencies(width, axes=len(along))
    per_axis = -(-width // len(along))
    panels = [
        (direction, _frequency_dots(learned.numpy(), start.numpy(), direction))
        for (direction, _), learned, start in zip(
            along, theta.split(per_axis, dim=-1), initial.split(per_axis), strict=True
        )
    ]
    figure = Figure(
        "Frequencies by key feature",
        fragment("panels", panels),
        "Each dot is one head of one block (darker: later block); dashes mark the initial "
        "frequencies. At 0 a feature ignores position; at 1 or -1 it rotates by about a sixth of "
        "a circle from one patch to the next.",
        columns=2,
    )
    lead = (
        f"MD-LRPE rotates feature j of queries and keys by the angle position {TIMES} theta_j, so "
        "that their product depends on relative positions; each axis has an equal share of the "
        "features. "
        f"{plural(theta[..., 0].numel(), 'head')} in {plural(len(theta), 'block')}, model of seed "
        f"{group.runs[0].seed}.{other_mixers(group.model, mixers)}"
    )
    return Section(LRPE, [figure], lead, folded=True)


def _frequency_dots(
    learned: Float[np.ndarray, "blocks H K"], initial: Float[np.ndarray, " K"], direction: str
) -> Markup:
    blocks, heads, features = learned.shape
    offsets = np.linspace(-0.25, 0.25, blocks * heads).reshape(blocks, heads, 1)
    x = np.arange(features) + offsets

    def draw(axes: Axes) -> None:
        axes.set(xlabel="key feature", ylabel="theta, radians per patch")
        for block in range(blocks):
            opacity = 0.35 + 0.65 * block / max(blocks - 1, 1)
            axes.plot(x[block].T, learned[block].T, ".", color=BLUE, alpha=opacity, markersize=4)
        left = np.arange(features) - 0.45
        axes.hlines(initial, left, left + 0.9, color=VERMILION, linewidth=1.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    description = f"Dot chart of the frequencies of {features} key features {direction.lower()}"
    return to_svg(draw, description=description)
