"""Vertical axes that keep what matters apart, with plain numbers on them."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from onescan.report.words import significant

ONE_DECADE, THREE_DECADES = 10, 1000
SHARES = (0.0, 0.3, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0)
FINER = (*np.arange(0, 0.95, 0.05).round(2).tolist(), *SHARES[SHARES.index(0.95) :])
FEW = 3  # ticks


def log_scale(axes: Axes) -> None:
    """Make the vertical axis of a finished plot logarithmic."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < ONE_DECADE * low:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    elif high < THREE_DECADES * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def share_scale(axes: Axes, low: float, high: float, *, least: float) -> None:
    """Make the vertical axis one of shares that widens towards 100%.

    Args:
        axes: what is drawn on it are shares from 0 to 1.
        low: the lowest share that is drawn.
        high: the highest.
        least: what is nearer than this to 1 counts as 1.
    """

    def stretched(share: ArrayLike) -> NDArray[np.float64]:
        return -np.log10(np.maximum(1 - np.asarray(share, float), least))

    ticks = _ticks(low, high, least)
    axes.set_yscale("function", functions=(stretched, lambda height: 1 - 10 ** -np.asarray(height)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, [f"{100 * tick:g}%" for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])


def from_zero(axes: Axes, *, spell: Callable[[float], str], least: float = 0.0) -> None:
    """Let the vertical axis begin at 0 and reach to `least` at least."""
    axes.set_ylim(0, max(least, axes.get_ylim()[1]))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: spell(value)))


def _ticks(low: float, high: float, least: float) -> list[float]:
    """Shares to write on the axis, from one at most `low` to one at least `high`.

    >>> _ticks(0.4, 0.97, 0.001), _ticks(0.02, 0.12, 0.001), _ticks(1.0, 1.0, 0.001)
    ([0.3, 0.5, 0.8, 0.9, 0.95, 0.98], [0.0, 0.05, 0.1, 0.15], [0.998, 1.0])
    """
    ticks = _among(SHARES, low, high, least)
    return ticks if len(ticks) > FEW else _among(FINER, low, high, least)


def _among(known: tuple[float, ...], low: float, high: float, least: float) -> list[float]:
    shares = np.array([s for s in known if s in (0, 1) or 1 - s > 2 * least])
    first = min(np.flatnonzero(shares <= low)[-1], len(shares) - 2)  # an axis has two ends
    last = np.flatnonzero(shares >= high)[0]
    return shares[first : max(last, first + 1) + 1].tolist()
