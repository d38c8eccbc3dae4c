"""What training took: speed, time lost to waiting for data, memory."""

import math
from collections.abc import Callable

import numpy as np

from onescan.report.lines import Line, line_chart, smoothed, thinned
from onescan.report.palette import series
from onescan.report.runs import Column, FinishedRun, RunGroup
from onescan.report.scales import from_zero
from onescan.report.section import Figure, Section
from onescan.report.words import GIB, duration, large, memory, percent

LEAST_SHARE = 0.1  # the axis of waiting reaches so far, or nothing would look like much
CPU = "cpu"  # as an environment names it


def section(study: RunGroup) -> Section:
    """Images per second, share of time spent waiting, memory."""
    unit = study.task.unit
    several = max(place.processes for place in study.runs[0].manifest.environments) > 1
    lead = "Waiting and memory are those of the first process." if several else ""
    return Section(
        "Speed and memory", (_speed(study, unit), _waiting(study), *_memory(study)), lead
    )


def _speed(study: RunGroup, unit: str) -> Figure:
    def speed(run: FinishedRun) -> Column:
        return run.manifest.run.training.batch_size / run.column("train", "seconds")

    html = _over_epochs(
        study, speed, f"{unit} per second", spell=large, statistic=np.median, faint=True
    )
    return Figure(
        f"{unit.capitalize()} per second",
        html,
        f"How many training {unit} an update takes in, divided by its time: faint, each update; "
        "strong, the running median; the number at the top is of the median of all. Evaluations "
        "and checkpoints are not counted. A step or a slope tells of something else that used the "
        "machine.",
    )


def _waiting(study: RunGroup) -> Figure:
    def waiting(run: FinishedRun) -> Column:
        return run.column("train", "waiting_seconds") / run.column("train", "seconds")

    waited = sum(run.waiting * run.seconds for run in study.runs)
    total = sum(run.seconds for run in study.runs)
    over = " over all seeds" if len(study.runs) > 1 else ""
    html = _over_epochs(study, waiting, "time spent waiting", spell=_share, least=LEAST_SHARE)
    return Figure(
        "Waiting for data",
        html,
        f"Part of each update's time in which there was no batch to learn from yet, as a running "
        f"mean. In all {percent(waited / total)} of the time, {duration(waited)} of "
        f"{duration(total)}{over}; more workers (machine.workers) lower it where it is high.",
    )


def _memory(study: RunGroup) -> tuple[Figure, ...]:
    most = max(run.memory_mib for run in study.runs)
    if math.isnan(most):  # a system that does not tell
        return ()
    on_cpu = study.runs[0].manifest.environments[0].device == CPU
    what = (
        "What the process holds in the computer's memory, libraries and data included."
        if on_cpu
        else "The most that was allocated on the GPU up to each update."
    )
    size, unit = (GIB, "GiB") if most > GIB else (1, "MiB")

    def used(run: FinishedRun) -> Column:
        return run.column("train", "memory_mib") / size

    def spell(amount: float) -> str:
        return f"{amount:.3g} {unit}"

    html = _over_epochs(study, used, "memory", spell=spell)
    caption = f"{what} At most {memory(most)}. A line that keeps rising would be a leak."
    return (Figure("Memory", html, caption),)


def _over_epochs(
    study: RunGroup,
    values: Callable[[FinishedRun], Column],
    what: str,
    *,
    spell: Callable[[float], str],
    statistic: Callable[[Column], float] = np.mean,
    faint: bool = False,
    least: float = 0.0,
) -> str:
    lines = []
    for i, run in enumerate(study.runs):
        y = values(run)
        places = thinned(len(y))
        x, smooth = run.column("train", "epoch")[places], smoothed(y, places, statistic)
        raw = (x, y[places]) if faint else None
        lines.append(Line(f"seed {run.seed}: {spell(smooth[-1])}", series(i), x, smooth, raw))
    return line_chart(
        lines, x="epoch", y=what, finish=lambda axes: from_zero(axes, spell=spell, least=least)
    )


def _share(share: float) -> str:
    return f"{share:.0%}"
