"""How GLUE's measures went: each over epochs, every seed."""

from onescan.report.lines import Line, line_chart
from onescan.report.palette import series
from onescan.report.runs import RunGroup
from onescan.report.section import Figure, Section
from onescan.report.words import metric_name, metric_value
from onescan.tasks.glue import LOSS

MEANINGS = {
    "accuracy": "Share of the held-out texts that are classified right.",
    "f1": "The harmonic mean of how many of the texts said to be of class 1 are, and how many of "
    "those that are were found.",
    "matthews_correlation": "Of what is said with what is right, over all four cells of the "
    "confusion matrix: 0 is guessing, 1 is right throughout.",
    "pearson": "How near the estimates lie to a straight line of the scores: 0 is no relation.",
    "spearman": "The same of their ranks, which only asks which pair is more alike.",
}


def section(study: RunGroup) -> Section:
    """A chart of each measure."""
    names = [name for name in study.runs[0].result.metrics if name != LOSS]
    return Section("What the benchmark asks", tuple(_figure(study, name) for name in names))


def _figure(study: RunGroup, name: str) -> Figure:
    meaning = next(text for end, text in MEANINGS.items() if name.endswith(end))
    return Figure(f"Test {metric_name(name)}", _curves(study, name), meaning)


def _curves(study: RunGroup, name: str) -> str:
    lines = []
    for place, run in enumerate(study.runs):
        y = run.column("test", name)
        end = f"seed {run.seed}: {metric_value(name, y[-1])}"
        lines.append(Line(end, series(place), run.column("test", "epoch"), y))
    return line_chart(lines, x="epoch", y=f"test {metric_name(name)}", finish=lambda _: None)
