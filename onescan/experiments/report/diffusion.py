"""The section about LDN's diffusion: its kernels, and how far they reach in each block."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from onescan.experiments.report.format import TIMES, percent
from onescan.experiments.report.images import patch_grid
from onescan.experiments.report.mixers import IMAGE_DIRECTIONS, find, other_mixers
from onescan.experiments.report.page import Figure, Section, fragment
from onescan.experiments.report.plots import (
    BLUE,
    COOL,
    DASHED,
    MUTED,
    SERIES,
    SURFACE,
    WARM,
    WIDE,
    WIDTH,
    Line,
    line_chart,
    log_scale,
    matrix,
    percent_tick,
    positions_in_blocks,
    series,
    to_svg,
)
from onescan.experiments.report.runs import RunGroup
from onescan.layers.mixers.linear_diffusion import (
    Diffusion,
    GaussianDiffusion,
    LinearDiffusionMixer,
)
from onescan.messages import plural
from onescan.models.image_classifier import ImageClassifier
from onescan.ops.linear_diffusion import diffusion_operator, stable_step
from onescan.shapes import Operators

TITLE = "Diffusion"
FEW_POINTS = 25  # on a curve; more have no markers
FAINT = 0.01  # of a panel's height; kernels are cut where all are below
KERNEL_PANEL = 200  # CSS pixels
MAPS = 4  # kernels that have a heat map each
FAINTEST, STRONGEST = 0.01, 100.0  # times a uniform share: ends of the color scale
UNREACHED = (0.5, 0.5, 0.5, 0.3)  # color
LEAST_SHARE = 1e-4  # smaller shares are not written out

Lags = Int[np.ndarray, " lags"]  # tokens back; negative ones lie ahead
PerBlock = Float[np.ndarray, "blocks H"]
Curves = Float[np.ndarray, "H lags"]
Weights = Float[np.ndarray, "blocks H all_lags"]
Influence = Float[np.ndarray, "blocks H _"]  # each line has its own number of tokens
Extent = Int[np.ndarray, "blocks H directions"]  # back, ahead


class DiffusionLine(NamedTuple):
    """A line along which tokens diffuse: all tokens in their order, or patches along an axis.

    Attributes:
        name: Heading of its charts; empty if there is only one line.
        noun: What lies along it.
        nouns: The plural.
        back: Where positive lags lie.
        tokens: Number of tokens.
        learned: Diffusion of each block.
        initial: The same before training.
    """

    name: str
    noun: str
    nouns: str
    back: str
    tokens: int
    learned: list[Diffusion]
    initial: list[Diffusion]

    @property
    def kernels(self) -> int:
        """Number of kernels of each block."""
        return len(self.learned[0].raw_step)

    @property
    def implicit(self) -> bool:
        """Whether time steps are implicit, so that they reach beyond the kernel."""
        return self.learned[0].scheme != "explicit"

    @property
    def bidirectional(self) -> bool:
        """Whether tokens ahead take part."""
        return not self.learned[0].causal

    @property
    def middle(self) -> int:
        """Index of the token in the middle."""
        return self.tokens // 2

    @property
    def lags(self) -> Lags:
        """Distance of each token before the one in the middle."""
        return self.middle - np.arange(self.tokens)

    @property
    def reachable_lags(self) -> Lags:
        """The lags of tokens that can have an influence."""
        return self.lags if self.bidirectional else self.lags[self.lags >= 0]


@torch.no_grad()
def section(group: RunGroup) -> Section:
    """Each block's kernels, and their combined influence on the token in the middle."""
    model, mixers = group.model, find(group.model, LinearDiffusionMixer)
    if not mixers or not isinstance(model, ImageClassifier):
        return Section(TITLE, lead="Not shown: this is not an image classifier with LDN mixers.")
    if not mixers[0].config.diffusion:
        return Section(TITLE, lead="Not shown: this model was built without diffusion.")
    if mixers[0].config.is_dense:
        return Section(TITLE, lead="Not shown: dense kernels do not depend on a distance.")
    if len(patch_grid(model)) != len(IMAGE_DIRECTIONS):
        return Section(TITLE, lead="Not shown: the figures need images with two axes.")
    lines, (rows, columns) = diffusion_lines(model), patch_grid(model)
    lead = (
        "In each block, a token exchanges a part of itself for a weighted mean of nearby tokens. "
        "The figures leave out the other parts of the blocks. "
        f"Model of seed {group.runs[0].seed}, with {rows} {TIMES} {columns} patches. "
        f"{_order(model)} {_coverage(model, lines)}{_dropped(model)}{other_mixers(model, mixers)}"
    )
    shares = [influence(line, line.middle) for line in lines]
    figures = [
        _kernel_figure(lines),
        *_width_figures(lines),
        _step_figure(lines),
        _distance_figure(lines, shares),
        _influence_figure(lines, shares),
    ]
    return Section(TITLE, figures, lead, folded=True)


# What diffuses, and how far


def diffusion_lines(model: ImageClassifier) -> list[DiffusionLine]:
    """Return the lines along which the model's tokens diffuse."""
    mixers, (rows, columns) = find(model, LinearDiffusionMixer), patch_grid(model)
    lines = [("", "token", "tokens", "tokens before it", model.prefix + rows * columns)]
    if mixers[0].config.separable:
        lines = [
            ("Along columns", "patch", "patches", "patches above", rows),
            ("Along rows", "patch", "patches", "patches to the left", columns),
        ]
    initial = [_initial(mixer, model.config.width, len(lines)) for mixer in mixers]
    return [
        DiffusionLine(*line, learned=_along(axis, mixers), initial=_along(axis, initial))
        for axis, line in enumerate(lines)
    ]


def _initial(mixer: LinearDiffusionMixer, width: int, axes: int) -> LinearDiffusionMixer:
    """The mixer's diffusion before training, which does not depend on the seed."""
    config = replace(mixer.config, local_update=False, linear_attention=False)
    return config.build(width=width, axes=axes)


def _along(axis: int, mixers: Sequence[LinearDiffusionMixer]) -> list[Diffusion]:
    diffusions = [mixer.diffusions[axis] for mixer in mixers]
    return [diffusion for diffusion in diffusions if isinstance(diffusion, Diffusion)]


@torch.no_grad()
def influence(line: DiffusionLine, token: int) -> Influence:
    """Return each token's share in one token after each block: its row of A_1, of A_2 A_1, ...

    Source: LDN, arXiv:2502.12381, Sec. 4.1.
    """
    unit = torch.zeros(line.kernels, 1, line.tokens, dtype=torch.float64)
    unit[..., token] = 1
    rows = unit[:, :0]
    for diffusion in reversed(line.learned):
        rows = torch.cat([unit, rows], dim=1) @ _operators(diffusion, line.tokens)
    return rows.transpose(0, 1).numpy()


def _operators(diffusion: Diffusion, tokens: int) -> Operators:
    weights = diffusion.weights()
    step = diffusion.dt(weights)
    return diffusion_operator(weights.double(), step.double(), tokens, scheme=diffusion.scheme)


def distance(shares: Influence, lags: Lags) -> PerBlock:
    """Return the root mean square distance of the contributions to a token, in tokens.

    >>> distance(np.array([[[0.25, 0.5, 0.25]]]), np.array([2, 0, -2])).round(3).tolist()
    [[1.414]]
    """
    weights = np.abs(shares)  # those of implicit steps may be negative
    mean_square: PerBlock = (weights * np.square(lags)).sum(axis=-1) / weights.sum(axis=-1)
    return np.sqrt(mean_square)


@torch.no_grad()
def extent(line: DiffusionLine) -> Extent:
    """Return how many tokens back and ahead have any influence after each block.

    A token keeps a share of itself, and all weights within a kernel's radius are positive, so the
    radii of the blocks add up. An implicit step reaches every token.
    """
    reach = []
    for diffusion in line.learned:
        weights = diffusion.weights()
        shares = weights * diffusion.dt(weights).unsqueeze(1)
        ahead, _, back = shares.tensor_split((diffusion.radius, diffusion.radius + 1), dim=1)
        reached = torch.stack([(back > 0).sum(1), (ahead > 0).sum(1)], dim=1)  # H directions
        reach.append((reached > 0) * line.tokens if line.implicit else reached)
    total: Extent = torch.stack(reach).cumsum(0).numpy()
    return total


def nearest(line: DiffusionLine) -> Int[np.ndarray, " blocks"]:
    """Return the distance within which all tokens have an influence in all channels, by block."""
    directions = slice(None) if line.bidirectional else slice(1)
    distances: Int[np.ndarray, " blocks"] = extent(line)[..., directions].min(axis=(1, 2))
    return distances


def blocks_to_cover(lines: Sequence[DiffusionLine]) -> int | None:
    """Return after how many blocks every token influences every other one, in all channels.

    If diffusion is causal, only later tokens count. None if the model has too few blocks.
    """
    covered = np.stack([nearest(line) >= line.tokens - 1 for line in lines]).all(axis=0)
    return int(covered.argmax()) + 1 if covered.any() else None


def _order(model: ImageClassifier) -> str:
    """Explain what a distance means."""
    if find(model, LinearDiffusionMixer)[0].config.separable:
        without = " Tokens other than patches do not take part." * bool(model.prefix)
        return f"Patches diffuse along their columns, and then along their rows.{without}"
    rows, columns = patch_grid(model)
    if rows == 1:
        return "Tokens are the patches from left to right."
    before = f", after {plural(model.prefix, 'other token')}" * bool(model.prefix)
    above = f"the patch above lies {plural(columns, 'token')} back"
    return f"Tokens are the patches row by row{before}: {above}."


def _coverage(model: ImageClassifier, lines: Sequence[DiffusionLine]) -> str:
    """Describe whether diffusion reaches all tokens."""
    config, noun = find(model, LinearDiffusionMixer)[0].config, lines[0].noun
    others = f"every {noun} before it" if config.is_causal else f"every other {noun}"
    depth, enough = len(lines[0].learned), blocks_to_cover(lines)
    if enough is not None:
        text = f"Diffusion alone reaches {others} within {plural(enough, 'block')} of {depth}."
    else:
        limits = " and ".join(
            f"{plural(int(nearest(line)[-1]), line.noun)} {line.name.lower()}".strip()
            for line in lines
            if nearest(line)[-1] < line.tokens - 1
        )
        text = (
            f"Diffusion alone does not reach {others} within {plural(depth, 'block')}: it reaches "
            f"{limits} in all channels."
        )
    before = " before it" * config.is_causal
    attention = f" Linear attention reads all tokens{before} in every block anyway."
    return text + attention * config.linear_attention


def _dropped(model: ImageClassifier) -> str:
    """Explain the effect of stochastic depth, which the figures ignore."""
    rate = model.config.drop_path
    if not rate:
        return ""
    return (
        f" Because of stochastic depth, blocks change tokens less in evaluation than shown: by "
        f"{percent(rate)} less in the last block."
    )


# Figures


def _panels(lines: Sequence[DiffusionLine], charts: Sequence[Markup], panel: float = 300) -> Markup:
    named = [(line.name, chart) for line, chart in zip(lines, charts, strict=True)]
    return fragment("panels", named, panel)


def _curves(x: Lags, learned: Curves, initial: Curves, names: Sequence[str]) -> list[Line]:
    """Return the curve of each kernel, or median and range of many, also before training."""
    band = None
    if len(learned) > len(SERIES):
        names, band = [""], (learned.min(axis=0), learned.max(axis=0))
        learned, initial = (np.median(each, axis=0, keepdims=True) for each in (learned, initial))
    dots = len(x) <= FEW_POINTS
    before = [
        Line("", series(i), x, y, style=DASHED, width=1, alpha=0.6) for i, y in enumerate(initial)
    ]
    after = [
        Line(name, series(i), x, y, band=band, width=1.4, dots=dots)
        for i, (name, y) in enumerate(zip(names, learned, strict=True))
    ]
    return before + after


def _colors(kernels: int) -> str:
    """Explain the colors of curves; empty if there is one kernel."""
    if kernels == 1:
        return ""
    if kernels <= len(SERIES):
        return " Each color is a kernel, which acts on its share of the channels."
    return f" Line: median of {kernels} kernels; band: their range."


def _kernel_figure(lines: Sequence[DiffusionLine]) -> Figure:
    weights = [(_weights(line.learned), _weights(line.initial)) for line in lines]
    top = 1.08 * max(float(np.nanmax(each)) for each in weights)
    panels = []
    for line, (learned, initial) in zip(lines, weights, strict=True):
        lags = _visible_lags(line, FAINT * top, learned, initial)
        indices = learned.shape[-1] // 2 + lags
        for block in range(len(learned)):
            curves = learned[block][:, indices], initial[block][:, indices]
            name = f"{line.name}, block {block + 1}" if line.name else f"Block {block + 1}"
            panels.append((name, _kernel_chart(line, lags, *curves, top)))
    implicit = " The step is implicit, so it reaches beyond the kernel." * lines[0].implicit
    return Figure(
        "Kernels by block",
        fragment("panels", panels, panel=160),
        "Share dt K that a token takes from each other token per step, by distance t - s. The "
        f"gap is the token itself, which keeps the rest. Dashed: before training."
        f"{_colors(lines[0].kernels)}{implicit}",
        columns=3,
    )


def _weights(diffusions: Sequence[Diffusion]) -> Weights:
    """Return the share taken in per step, dt K, at 2R+1 lags; NaN at the token itself."""
    shares = []
    for diffusion in diffusions:
        weights = diffusion.weights()
        share = weights * diffusion.dt(weights).unsqueeze(1)
        share[:, diffusion.radius] = torch.nan
        shares.append(share.double())
    return torch.stack(shares).numpy()


def _visible_lags(
    line: DiffusionLine, threshold: float, learned: Weights, initial: Weights
) -> Lags:
    """Return the lags up to the furthest where a kernel exceeds `threshold`, within the line."""
    *_, columns = np.nonzero(np.concatenate([learned, initial]) > threshold)
    furthest = int(np.abs(columns - learned.shape[-1] // 2).max(initial=1))
    shown = min(furthest, max(line.tokens - 1, 1))
    return np.arange(-shown, shown + 1)


def _kernel_chart(
    line: DiffusionLine, lags: Lags, learned: Curves, initial: Curves, top: float
) -> Markup:
    highest = percent(float(np.nanmax(learned)))
    return line_chart(
        _curves(lags, learned, initial, [""] * len(learned)),
        x=line.back,
        y="",
        format=percent_tick,
        limits=(0, top),
        description=f"Line chart of the share taken in by distance, at most {highest} of one token",
        width=KERNEL_PANEL,
        height=150,
    )


def _width_figures(lines: Sequence[DiffusionLine]) -> list[Figure]:
    """Return the figure of the widths of Gaussian kernels; [] if they are not Gaussian."""

    def width(diffusions: Sequence[Diffusion]) -> PerBlock:
        gaussians = [each for each in diffusions if isinstance(each, GaussianDiffusion)]
        return torch.stack([each.sigma() for each in gaussians]).double().numpy()

    if not isinstance(lines[0].learned[0], GaussianDiffusion):
        return []
    widths = [(width(line.learned), width(line.initial)) for line in lines]
    limits = float(np.min(widths)) / 1.3, float(np.max(widths)) * 1.3

    def finish(axes: Axes) -> None:
        axes.set_ylim(limits)
        axes.set_ylabel(f"sigma, {lines[0].nouns}" + log_scale(axes))

    charts = [_dots(*each, "kernel widths", finish) for each in widths]
    figure = Figure(
        "Kernel width",
        _panels(lines, charts),
        "Standard deviation of each block's Gaussian kernel. At this distance, a token has 61% of "
        f"the weight of a nearby one.{_dots_meaning(lines[0].kernels)}",
    )
    return [figure]


def _step_figure(lines: Sequence[DiffusionLine]) -> Figure:
    def step(diffusions: Sequence[Diffusion]) -> PerBlock:
        pairs = [(each, each.weights()) for each in diffusions]
        return torch.stack([each.dt(w) / stable_step(w) for each, w in pairs]).double().numpy()

    steps = [(step(line.learned), step(line.initial)) for line in lines]
    top = max(1.0, 1.05 * float(np.max(steps)))

    def finish(axes: Axes) -> None:
        axes.set(ylim=(0, top), ylabel="step / longest stable step")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: percent_tick(share)))

    meaning = (
        "an implicit step may be longer"
        if lines[0].implicit
        else "the share of itself that a token far from both ends exchanges"
    )
    return Figure(
        "Time step",
        _panels(lines, [_dots(*each, "time steps", finish) for each in steps]),
        f"dt relative to the longest stable explicit step: {meaning}."
        f"{_dots_meaning(lines[0].kernels)}",
    )


def _dots_meaning(kernels: int) -> str:
    if kernels > len(SERIES):
        return f" Each dot is one of {kernels} kernels."
    return " Each color is a kernel." * (kernels > 1) + " Rings: before training."


def _dots(
    learned: PerBlock, initial: PerBlock, what: str, finish: Callable[[Axes], object]
) -> Markup:
    """A dot for each kernel of each block, on a line from a ring for its value before training."""
    blocks, kernels = learned.shape

    def draw(axes: Axes) -> None:
        x = positions_in_blocks(axes, learned, spread=0.5)
        if kernels > len(SERIES):
            axes.plot(x, learned, "o", color=BLUE, markersize=2, alpha=0.6)
        else:
            for i in range(kernels):
                color = series(i)
                axes.vlines(x[:, i], initial[:, i], learned[:, i], color=color, alpha=0.4, lw=1)
                (ring,) = axes.plot(x[:, i], initial[:, i], "o", color=color, markersize=3.5)
                ring.set(markerfacecolor=SURFACE, markeredgewidth=0.8, alpha=0.7)
                axes.plot(x[:, i], learned[:, i], "o", color=color, markersize=3.5)
        finish(axes)

    description = (
        f"Dot chart of the {what} of {plural(blocks, 'block')}: learned from {learned.min():.3g} "
        f"to {learned.max():.3g}, before training {initial.min():.3g} to {initial.max():.3g}"
    )
    return to_svg(draw, description=description)


def _distance_figure(lines: Sequence[DiffusionLine], shares: Sequence[Influence]) -> Figure:
    learned = [distance(each, line.lags) for line, each in zip(lines, shares, strict=True)]
    initial = [
        distance(influence(line._replace(learned=line.initial), line.middle), line.lags)
        for line in lines
    ]
    uniform = [float(np.sqrt(np.square(line.reachable_lags).mean())) for line in lines]
    top = 1.08 * max(*uniform, *(float(each.max()) for each in (*learned, *initial))) or 1.0
    charts = [
        _distance_chart(*each, top) for each in zip(lines, learned, initial, uniform, strict=True)
    ]
    return Figure(
        "Distance of influence",
        _panels(lines, charts),
        f"Root mean square distance of the {lines[0].nouns} that contribute to the one in the "
        "middle, by diffusion alone. Dashed: before training; dotted: equal shares of all."
        f"{_colors(lines[0].kernels)}",
    )


def _distance_chart(
    line: DiffusionLine, learned: PerBlock, initial: PerBlock, uniform: float, top: float
) -> Markup:
    blocks, kernels = learned.shape
    learned, initial = (np.vstack([np.zeros(kernels), each]) for each in (learned, initial))
    last = learned[-1]
    names = ["learned"] if kernels == 1 else [f"kernel {i + 1}" for i in range(kernels)]
    x = np.arange(blocks + 1)
    limit = Line("uniform", MUTED, x, np.full(len(x), uniform), style=":", width=1.2)
    description = (
        f"Line chart of the distance of influence: after block {blocks} from {last.min():.3g} to "
        f"{last.max():.3g} {line.nouns}; {uniform:.3g} for equal shares"
    )
    return line_chart(
        [limit, *_curves(x, learned.T, initial.T, names)],
        x="after block",
        y=f"distance, {line.nouns}",
        limits=(0, top),
        description=description,
    )


def _influence_figure(lines: Sequence[DiffusionLine], shares: Sequence[Influence]) -> Figure:
    kernels, panels = lines[0].kernels, []
    for line, each in zip(lines, shares, strict=True):
        shown = _shown_kernels(distance(each, line.lags)[-1])
        for i in shown:
            kernel = f"kernel {i + 1}" * (kernels > 1)
            name = ", ".join(filter(None, [line.name, kernel])).capitalize()
            panels.append((name, line, each, i))
    width = {1: WIDE, 2: WIDE // 2}.get(len(panels), WIDTH)
    maps = [(name, _influence_map(line, each, i, width)) for name, line, each, i in panels]
    legend = fragment(
        "legend",
        "1/100 of a uniform share",
        f"100 {TIMES}",
        "transparent, var(--blue), var(--vermilion)",
    )
    weakest = " and ".join(_weakest(*both) for both in zip(lines, shares, strict=True))
    some = f" Of {kernels} kernels, those with the shortest, median and longest distance are shown."
    negative = " Shares of implicit steps may be negative; their magnitude is shown."
    return Figure(
        f"Influence on the {lines[0].noun} in the middle",
        fragment("panels", maps, panel=min(width, WIDE // 2)) + legend,
        "Each row shows the contributions to the token in the middle after a block, by diffusion "
        "alone, relative to equal shares of all. Gray: no influence. After the last block, "
        f"{weakest}."
        f"{some * (kernels > MAPS)}{negative * lines[0].implicit}",
        columns=3,
    )


def _weakest(line: DiffusionLine, shares: Influence) -> str:
    least = float(np.abs(shares[-1])[_reached(line)[-1]].min())
    name = f" {line.name.lower()}" * bool(line.name)
    share = f"below {percent(LEAST_SHARE, 2)}" if least < LEAST_SHARE else percent(least, 2)
    uniform = percent(1 / len(line.reachable_lags), 2)
    return f"the smallest share{name} is {share}, compared with {uniform} for equal shares"


def _influence_map(line: DiffusionLine, shares: Influence, kernel: int, width: int) -> Markup:
    blocks = len(shares)
    relative = np.abs(shares[:, kernel]) * len(line.reachable_lags)
    colors = _influence_colors(relative)
    colors[~_reached(line)[:, kernel]] = UNREACHED
    description = (
        f"Heat map of the influence of {line.tokens} {line.nouns} on the one in the middle after "
        f"each of {plural(blocks, 'block')}"
    )
    height = min(max(150, 22 * blocks + 62), 400)
    return matrix(
        colors[:, ::-1],  # by increasing lags
        (float(line.lags[-1]), float(line.lags[0])),
        x=line.back,
        y="after block",
        description=description,
        width=width,
        height=height,
    )


def _influence_colors(
    relative: Float[np.ndarray, "blocks T"],
) -> Float[np.ndarray, "blocks T rgba"]:
    """Color shares relative to a uniform one: transparent at 1/100, blue at 1, orange at 100."""
    levels = np.log10(relative.clip(FAINTEST, STRONGEST)) / np.log10(STRONGEST)  # -1 to 1
    warm = levels.clip(0, 1)[..., None]
    colors = (1 - warm) * COOL + warm * WARM
    return np.concatenate([colors, (1 + levels).clip(0, 1)[..., None]], axis=-1)


def _reached(line: DiffusionLine) -> Bool[np.ndarray, "blocks H T"]:
    """Return which tokens influence the token in the middle, after each block."""
    back, ahead = np.moveaxis(extent(line), -1, 0)[..., None]
    return (-ahead <= line.lags) & (line.lags <= back)


def _shown_kernels(distances: Float[np.ndarray, " H"]) -> list[int]:
    """Return all kernels or, if there are many, those of shortest, median and longest distance."""
    if len(distances) <= MAPS:
        return list(range(len(distances)))
    order = np.argsort(distances, kind="stable")
    return [int(order[0]), int(order[len(order) // 2]), int(order[-1])]
