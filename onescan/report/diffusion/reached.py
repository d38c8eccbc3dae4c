"""What a token in the middle consists of after each block: how far off it lies, and in full."""

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from onescan.report.chart import chart, label_ends
from onescan.report.diffusion.curves import colors, curves
from onescan.report.diffusion.lines import Influence, Line, PerBlock, distance, influence, reach
from onescan.report.diffusion.panels import WIDE, count_blocks, panels
from onescan.report.palette import BLUE, MUTED, SERIES, series
from onescan.report.scales import from_zero
from onescan.report.section import Figure
from onescan.report.words import TIMES, percent, plural, significant

WHITE, BLACK = 0.01, 100.0  # times an even share: what is beyond has the colour of these
LEAST = 1e-4  # a fainter share is not spelt
MOST_MAPS = 4  # kernels that have a heat map each
ROW, AROUND, SMALLEST, LARGEST = 22, 62, 190, 400  # CSS pixels: heights of a block and of a map
SHARES = LinearSegmentedColormap.from_list(
    "faint, even, all", ["#ffffff", "#9ccbe8", BLUE, "#00395a", "#000000"]
)
TICKS = {0.01: "1/100", 0.1: "1/10", 1: "even", 10: f"10 {TIMES}", 100: f"100 {TIMES}"}
NOTHING = "#cdd2d8"


def reached_figures(lines: list[Line]) -> tuple[Figure, Figure]:
    """Distances over the blocks, and heat maps."""
    shares = [influence(line, line.middle) for line in lines]
    return _distance_figure(lines, shares), _map_figure(lines, shares)


def _distance_figure(lines: list[Line], shares: list[Influence]) -> Figure:
    learnt = [distance(each, line.lags) for line, each in zip(lines, shares, strict=True)]
    initial = [
        distance(influence(line._replace(learnt=line.initial), line.middle), line.lags)
        for line in lines
    ]
    even = [float(np.sqrt(np.square(line.heard_lags).mean())) for line in lines]
    top = 1.08 * max(*even, *(float(each.max()) for each in (*learnt, *initial)))
    pictures = [_distances(*each, top) for each in zip(lines, learnt, initial, even, strict=True)]
    return Figure(
        "Distance heard from",
        panels(lines, pictures),
        "How far what a token in the middle consists of lies from it, as the root mean square of "
        "the distance, by diffusion alone. Dashed: before training; dotted: if it had taken in "
        f"the same of every one.{colors(lines[0].kernels)}",
    )


def _distances(line: Line, learnt: PerBlock, initial: PerBlock, even: float, top: float) -> str:
    blocks, kernels = learnt.shape
    learnt, initial = (np.vstack([np.zeros(kernels), each]) for each in (learnt, initial))
    last = learnt[-1]
    names = ["learnt"] if kernels == 1 else [f"kernel {i + 1}" for i in range(kernels)]
    ends = [(float(blocks), even, "even", MUTED)]
    if kernels <= len(SERIES):
        ends += [(float(blocks), float(last[i]), name, series(i)) for i, name in enumerate(names)]

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="after block", ylabel=f"distance, {line.nouns}")
        axes.set_ylim(0, top or 1.0)
        axes.axhline(even, color=MUTED, linestyle=":", linewidth=1.2)
        curves(axes, np.arange(blocks + 1), learnt.T, initial.T)
        count_blocks(axes.xaxis)
        from_zero(axes, spell=significant)
        label_ends(axes, ends)

    alt = (
        f"Line chart of the distance heard from: after block {blocks} it is {last.min():.3g}"
        f"{f' to {last.max():.3g}' * (kernels > 1)} {line.nouns}; {even:.3g} would be even"
    )
    return chart(draw, alt=alt)


def _map_figure(lines: list[Line], shares: list[Influence]) -> Figure:
    kernels, each = lines[0].kernels, list(zip(lines, shares, strict=True))
    width = WIDE if kernels > 1 or len(lines) == 1 else WIDE // 2
    faintest = " and ".join(_faintest(*both) for both in each)
    some = f" Of {kernels} kernels those are shown that reach least, to the middle, and furthest."
    negative = " An implicit step's shares may be below 0, and show their size."
    return Figure(
        f"What the middle {lines[0].noun} has heard of",
        panels(lines, [_maps(*both, width) for both in each], width=width),
        "Row by row, what a token in the middle consists of after each block, by diffusion alone: "
        "how much of each, compared with an equal share of all. White: a hundredth of that, or "
        f"less; grey: nothing at all. In the end {faintest}.{some * (kernels > MOST_MAPS)}"
        f"{negative * lines[0].implicit}",
        columns=3,
    )


def _faintest(line: Line, shares: Influence) -> str:
    least = float(np.abs(shares[-1])[_heard(line)[-1]].min())
    name = f" {line.name.lower()}" * bool(line.name)
    spelt = f"below {percent(LEAST, 2)}" if least < LEAST else percent(least, 2)
    even = percent(1 / len(line.heard_lags), 2)
    return f"the faintest share{name} is {spelt}, where {even} would be even"


def _maps(line: Line, shares: Influence, width: int) -> str:
    shown = _shown_kernels(distance(shares, line.lags)[-1])
    blocks, kernels, _ = shares.shape
    sizes = np.clip(np.abs(shares) * len(line.heard_lags), WHITE, BLACK)
    heard = np.ma.masked_array(sizes, ~_heard(line))[..., ::-1]  # by rising lags
    edges = line.lags[-1] - 0.5, line.lags[0] + 0.5, blocks + 0.5, 0.5

    def draw(figure: Drawing) -> None:
        norm = LogNorm(WHITE, BLACK)
        maps = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, i in zip(maps, shown, strict=True):
            axes.set_facecolor(NOTHING)
            axes.imshow(heard[:, i], cmap=SHARES, norm=norm, extent=edges, aspect="auto")
            axes.set(xlabel=line.back, title=f"kernel {i + 1}" * (kernels > 1))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            count_blocks(axes.yaxis)
            axes.grid(visible=False)
            axes.spines[:].set_visible(False)
        maps[0].set_ylabel("after block")
        bar = figure.colorbar(ScalarMappable(norm, SHARES), ax=maps, aspect=12)
        bar.set_ticks(list(TICKS), labels=list(TICKS.values()), minor=False)
        bar.outline.set_visible(False)
        bar.ax.grid(visible=False)

    alt = (
        f"Heat map of what a token in the middle of {line.tokens} has heard of after each of "
        f"{plural(blocks, 'block')}"
    )
    height = min(max(SMALLEST, ROW * blocks + AROUND), LARGEST)
    return chart(draw, alt=alt, width=width, height=height)


def _heard(line: Line) -> Bool[np.ndarray, "blocks H T"]:
    """Of whom the token in the middle has heard."""
    back, ahead = np.moveaxis(reach(line), -1, 0)[..., None]
    return (-ahead <= line.lags) & (line.lags <= back)


def _shown_kernels(distances: Float[np.ndarray, " H"]) -> list[int]:
    """The kernels that have a heat map: all, or those that reach least, half way, and furthest."""
    if len(distances) <= MOST_MAPS:
        return list(range(len(distances)))
    order = np.argsort(distances, kind="stable")
    return [int(order[0]), int(order[len(order) // 2]), int(order[-1])]
