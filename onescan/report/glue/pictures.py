"""Each task's score: of every seed at the end, and on the way there."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from onescan.data.glue import PROBLEMS, GlueTask
from onescan.report.chart import chart
from onescan.report.glue.outcome import GlueOutcome
from onescan.report.lines import Line, line_chart
from onescan.report.palette import BLUE, series
from onescan.report.runs import Column, FinishedRun
from onescan.report.section import Figure, Section
from onescan.tasks.glue import glue_score

ROW = 24  # CSS pixels


def section(outcome: GlueOutcome) -> Section:
    """Both charts."""
    several = len(outcome.seeds) > 1
    dots = "small dots: single seeds; large: their mean" if several else "one seed"
    band = " Line: mean over seeds; band: lowest to highest seed." if several else ""
    return Section(
        "Scores",
        (
            Figure(
                "Score of each task",
                _dots(outcome),
                f"The mean of a task's measures, times 100 ({dots}). 0 is what guessing earns of "
                "CoLA and STS-B; of the others guessing earns more. The axis ends at 100, and "
                "begins where the dots do.",
            ),
            Figure(
                "Score on the way",
                _curves(outcome),
                "The score at each evaluation, against the part of the task's own training that "
                f"was done.{band} A curve that still rises at its end asks for more epochs.",
                columns=2,
            ),
        ),
    )


def scores_on_the_way(run: FinishedRun) -> Column:
    """The score of each evaluation, in their order."""
    columns = {name: run.column("test", name) for name in run.result.metrics}
    evaluations = len(run.column("test", "epoch"))
    return np.array(
        [
            glue_score({name: float(column[place]) for name, column in columns.items()})
            for place in range(evaluations)
        ]
    )


def _dots(outcome: GlueOutcome) -> str:
    titles = [PROBLEMS[task].title for task in outcome.runs]
    scores = [100 * np.array(outcome.score(task).values) for task in outcome.runs]

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="score")
        for place, values in enumerate(scores):
            axes.plot(values, [place] * len(values), ".", color=BLUE, alpha=0.35, markersize=7)
            axes.plot(values.mean(), place, "o", color=BLUE, markersize=6, clip_on=False)
            at = 1.05, place
            axes.annotate(
                f"{values.mean():.1f}", at, xycoords=("axes fraction", "data"), va="center"
            )
        axes.set_yticks(range(len(titles)), titles)
        axes.set_ylim(len(titles) - 0.5, -0.5)
        axes.set_xlim(right=100)

    told = ", ".join(f"{t} {s.mean():.1f}" for t, s in zip(titles, scores, strict=True))
    alt = f"Dot chart of the score of each task: {told}"
    return chart(draw, alt=alt, height=90 + ROW * len(titles))


def _curves(outcome: GlueOutcome) -> str:
    lines = [_line(outcome, task, series(place)) for place, task in enumerate(outcome.runs)]

    def finish(axes: Axes) -> None:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return line_chart(lines, x="part of training", y="score", finish=finish)


def _line(outcome: GlueOutcome, task: GlueTask, color: str) -> Line:
    epochs = outcome.runs[task][0].column("test", "epoch")
    ys = 100 * np.stack([scores_on_the_way(run) for run in outcome.runs[task]])
    mean = ys.mean(axis=0)
    band = (ys.min(axis=0), ys.max(axis=0)) if len(ys) > 1 else None
    name = f"{PROBLEMS[task].title} {mean[-1]:.1f}"
    return Line(name, color, epochs / epochs[-1], mean, band=band)
