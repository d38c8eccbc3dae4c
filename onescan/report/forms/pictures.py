"""Time and memory over image sizes, and one against the other."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from onescan.bench.form_costs import FormCosts
from onescan.report.chart import chart, label_ends
from onescan.report.forms.measures import (
    Measure,
    colors,
    memory_held,
    most_measured,
    time_per_image,
)
from onescan.report.palette import GRID
from onescan.report.scales import log_scale
from onescan.report.section import Figure, Section
from onescan.report.words import TIMES, significant

WIDE = 100  # between the ends of an axis: powers of ten are enough


def pictures(costs: FormCosts) -> Section:
    """Three pictures: time, memory, and the trade-off between them."""
    time, held, size = time_per_image(costs), memory_held(), most_measured(costs)
    over_time = Figure(
        "Time",
        _over_sizes(costs, time),
        "Of one image. Twice the side is four times the patches, which take four times as long "
        "where a form is linear in them, and sixteen times where it is quadratic. Both axes are "
        "logarithmic.",
    )
    over_memory = Figure(
        "Memory",
        _over_sizes(costs, held),
        "The most that a forward holds at once, beyond the model and the images. Both axes are "
        "logarithmic.",
    )
    trade_off = Figure(
        f"Trade-off at {size} {TIMES} {size}",
        _against(costs, size, time, held),
        "A dot is a form; a line joins sizes of chunks, where there are some. The lower, the "
        "faster; the further to the left, the less memory.",
    )
    return Section("Time and memory", (over_time, over_memory, trade_off))


def _over_sizes(costs: FormCosts, measure: Measure) -> str:
    sizes, shown = sorted({cost.size for cost in costs.costs}), colors(costs)

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="side of the image, pixels", ylabel=measure.axis)
        ends: list[tuple[float, float, str, str]] = []
        for variant, color in shown.items():
            x = [cost.size for cost in costs.of(variant)]
            y = [measure.of(cost) for cost in costs.of(variant)]
            axes.plot(x, y, color=color, marker="o", markersize=3.5)
            early = f" (to {x[-1]})" * (x[-1] < sizes[-1])
            ends.append((float(x[-1]), y[-1], variant.name + early, color))
        axes.set_xscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        log_scale(axes)
        label_ends(axes, ends)

    names = ", ".join(variant.name for variant in shown)
    return chart(draw, alt=f"Line chart of {measure.axis} over image sizes, for {names}")


def _against(costs: FormCosts, size: int, time: Measure, held: Measure) -> str:
    shown = colors(costs)
    places = {
        variant: (held.of(cost), time.of(cost))
        for variant in shown
        for cost in costs.of(variant)
        if cost.size == size
    }
    chunks = [place for variant, place in places.items() if variant.chunk_size is not None]

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel=held.axis, ylabel=time.axis)
        axes.plot([x for x, _ in chunks], [y for _, y in chunks], color=GRID, zorder=1)
        for variant, place in places.items():
            axes.plot(*place, "o", color=shown[variant], markersize=6)
        _log_below(axes)
        log_scale(axes)
        label_ends(axes, [(*place, v.name, shown[v]) for v, place in places.items()])

    return chart(draw, alt=f"Dot chart of {time.axis} against {held.axis} at {size} pixels")


def _log_below(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with plain numbers on it."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if high > WIDE * low else (1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
    axes.xaxis.set_minor_locator(NullLocator())
