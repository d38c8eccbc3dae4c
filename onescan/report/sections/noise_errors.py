"""How well noise is told at each timestep."""

import numpy as np
from matplotlib.axes import Axes

from onescan.report.lines import LEAST, Line, line_chart
from onescan.report.palette import series
from onescan.report.runs import FinishedRun, RunGroup
from onescan.report.scales import log_scale
from onescan.report.section import Figure, Section
from onescan.tasks import ImageGeneration

BINS = 20


def section(study: RunGroup) -> Section:
    """The error of the last evaluation over timesteps."""
    assert isinstance(study.task, ImageGeneration)
    figure = Figure(
        "Error over timesteps",
        line_chart(
            [_line(run, series(i)) for i, run in enumerate(study.runs)],
            x="timestep: 0 is the image, 1000 pure noise",
            y="mean squared error",
            finish=_finish,
        ),
        f"Of the held-out images, in {BINS} spans of timesteps, on a logarithmic axis. Each image "
        "is looked at once in each quarter, always with the same noise.",
        columns=2,
    )
    return Section("Where noise is hard to tell", (figure,))


def _line(run: FinishedRun, color: str) -> Line:
    arrays = run.result.evaluation.arrays
    steps, errors = (arrays[name].flatten().double().numpy() for name in ("timesteps", "errors"))
    places = np.minimum(steps * BINS // 1000, BINS - 1).astype(int)
    counts = np.bincount(places, minlength=BINS)
    means = np.bincount(places, errors, minlength=BINS)[counts > 0] / counts[counts > 0]
    x = (np.flatnonzero(counts) + 0.5) * 1000 / BINS
    return Line(f"seed {run.seed}: {errors.mean():.3f}", color, x, np.maximum(means, LEAST))


def _finish(axes: Axes) -> None:
    log_scale(axes)
