"""A curve for each of a block's kernels, or for many of them their median and range."""

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from onescan.report.diffusion.lines import Lags
from onescan.report.palette import BLUE, SERIES, series

FEW_DOTS = 25  # on a curve
DASHED = (0, (3, 2))

Curves = Float[np.ndarray, "H lags"]


def curves(axes: Axes, x: Lags, learnt: Curves, initial: Curves) -> None:
    """Draw each kernel's curve over that before training."""
    if len(learnt) > len(SERIES):
        axes.fill_between(x, learnt.min(axis=0), learnt.max(axis=0), color=BLUE, alpha=0.2, lw=0)
        learnt, initial = (np.median(each, axis=0, keepdims=True) for each in (learnt, initial))
    marker = "o" if len(x) <= FEW_DOTS else ""
    for i, y in enumerate(initial):
        axes.plot(x, y, color=series(i), linestyle=DASHED, linewidth=1, alpha=0.6)
    for i, y in enumerate(learnt):
        axes.plot(x, y, color=series(i), linewidth=1.4, marker=marker, markersize=2.5)


def colors(kernels: int) -> str:
    """A sentence on what the curves' colours mean; none where there is one kernel."""
    if kernels == 1:
        return ""
    if kernels <= len(SERIES):
        return " A colour is a kernel, which moves its share of the channels."
    return f" Line: the median of {kernels} kernels; band: from the least to the most."
