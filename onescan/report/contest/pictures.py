"""Time, memory and ratios over sizes; bars where there is one size."""

from collections.abc import Callable
from typing import NamedTuple

from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator, NullLocator

from onescan.bench.contest.outcome import Outcome, Results
from onescan.bench.contests import Contest
from onescan.report.chart import chart, label_ends
from onescan.report.contest.figures import largest
from onescan.report.palette import MUTED, series
from onescan.report.scales import log_scale
from onescan.report.section import Figure, Section
from onescan.report.words import label, large

LEAST_MIB = 0.01  # so that no memory at all has a place on a logarithmic axis
BAR_HEIGHT, AROUND = 26, 60  # CSS pixels
FEW_TICKS = 4
THOUSAND, MOST_COLORS = 1024, 6


class Measure(NamedTuple):
    """Something of an outcome that is drawn.

    Attributes:
        title: of the picture.
        axis: what stands along it.
        of: an outcome's; None where it has none.
        caption: how to read it.
    """

    title: str
    axis: str
    of: Callable[[Outcome], float | None]
    caption: str


TIME = Measure(
    "Time",
    "milliseconds a call",
    lambda outcome: outcome.time_ms.median,
    "The median of rounds.",
)
MEMORY = Measure(
    "Memory",
    "MiB",
    lambda outcome: max(outcome.peak_mib + outcome.state_mib, LEAST_MIB),
    "The most that a call held beyond what was there before it, and what is carried from call to "
    "call.",
)
RATIO = Measure(
    "Ratio",
    "times the first contestant's",
    lambda outcome: None if outcome.ratio is None else outcome.ratio.median,
    "Above 1 a contestant takes longer than the first.",
)
BANDS = {
    TIME: " The band is from the lower to the upper quartile.",
    RATIO: " The band is from the lower to the upper quartile of ratios round by round.",
}
LOGARITHMIC = " Both axes are logarithmic."


def pictures(results: Results, contest: Contest) -> list[Section]:
    """A section for each work: three charts over sizes."""
    return [_section(results, contest, work) for work in results.works]


def _section(results: Results, contest: Contest, work: str) -> Section:
    title = f"{work[0].upper()}{work[1:]}: over sizes"
    sizes = {heat.size for heat in results.heats if heat.work == work and heat.outcomes}
    if not sizes:
        return Section(title, lead="No contestant could run.")
    if len(sizes) == 1:
        bars = (_bars(results, work, measure) for measure in (_speed(contest), MEMORY))
        return Section(
            title.replace("over sizes", contest.at.format(f"{sizes.pop():,}")), tuple(bars)
        )
    lines = (_lines(results, contest, work, measure) for measure in (TIME, MEMORY, RATIO))
    return Section(title, tuple(lines))


def _speed(contest: Contest) -> Measure:
    """What a bar shows: how much is done a second, or how long it takes."""
    if not contest.items:
        return TIME
    caption = f"How many {contest.items} pass in a second, by the median time."
    return Measure("Speed", f"{contest.items} a second", lambda o: o.per_second, caption)


def _lines(results: Results, contest: Contest, work: str, measure: Measure) -> Figure:
    shown = {
        name: {s: y for s, o in results.of(name, work).items() if (y := measure.of(o)) is not None}
        for name in results.names
    }
    sizes = sorted({size for line in shown.values() for size in line})

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel=contest.axis, ylabel=measure.axis)
        ends: list[tuple[float, float, str, str]] = []
        for i, (name, line) in enumerate(shown.items()):
            if line:
                color = series(i)
                style = "--" if i >= MOST_COLORS else "-"
                axes.plot([*line], [*line.values()], style, color=color, marker="o", markersize=3)
                low, high = _band(results, work, name, measure)
                axes.fill_between([*line], low, high, color=color, alpha=0.15, linewidth=0)
                early = f" (to {_short(max(line))})" * (max(line) < sizes[-1])
                ends.append((float(max(line)), line[max(line)], label(name) + early, color))
        axes.set_xscale("log")
        axes.set_xticks(sizes, [_short(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        log_scale(axes)
        if measure is RATIO:
            axes.axhline(1, color=MUTED, linestyle="--", linewidth=1, zorder=0)
        label_ends(axes, ends)

    names = ", ".join(name for name, line in shown.items() if line)
    alt = f"Line chart of {measure.axis} over {contest.axis}, {work}, for {names}"
    caption = measure.caption + BANDS.get(measure, "") + LOGARITHMIC
    return Figure(measure.title, chart(draw, alt=alt), caption)


def _band(
    results: Results, work: str, name: str, measure: Measure
) -> tuple[list[float], list[float]]:
    """The quartiles of what is drawn, or what is drawn where there are none."""
    low, high = [], []
    for outcome in results.of(name, work).values():
        value = measure.of(outcome)
        spread = {TIME: outcome.time_ms, RATIO: outcome.ratio}.get(measure)
        if value is not None:
            low.append(value if spread is None else spread.low)
            high.append(value if spread is None else spread.high)
    return low, high


def _bars(results: Results, work: str, measure: Measure) -> Figure:
    heat = largest(results, work)
    values = {outcome.name: measure.of(outcome) or 0.0 for outcome in heat.outcomes}
    colors = [series(results.names.index(name)) for name in values]

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel=measure.axis)
        bars = axes.barh(range(len(values)), [*values.values()], color=colors, height=0.65)
        axes.bar_label(bars, [f" {large(value)}" for value in values.values()], color=MUTED)
        axes.xaxis.set_major_locator(MaxNLocator(FEW_TICKS))
        axes.xaxis.set_major_formatter(lambda value, _: large(value))
        axes.set_yticks(range(len(values)), [label(name) for name in values])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.grid(visible=False, axis="y")

    alt = f"Bar chart of {measure.axis}, {work}, for {', '.join(values)}"
    height = AROUND + BAR_HEIGHT * len(values)
    return Figure(measure.title, chart(draw, alt=alt, height=height), measure.caption)


def _short(size: int) -> str:
    """Spell a size below an axis: powers of two of a thousand and more in k.

    >>> _short(256), _short(16384), _short(1000), _short(100000)
    ('256', '16k', '1000', '100000')
    """
    return f"{size // THOUSAND}k" if size >= THOUSAND and size % THOUSAND == 0 else str(size)
